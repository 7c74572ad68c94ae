"""The scripts in slurm/ and `pdmpi submit`, as a person would use them, under a real Slurm."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults.fault_run import losses, make_run
from launch import PDMPI, REPOSITORY
from sandbox import Sandbox, private_slurm

from pdmpi.checkpoint.status import read_status

pytestmark = [pytest.mark.slurm, pytest.mark.mpi]

CLUSTER = """
name = "two"
devices_per_node = 1
[[levels]]
name = "network"
count = 2
bandwidth = "2 GB/s"
[[devices]]
name = "cpu"
memory = "1 GiB"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with the scripts, a run, a plan for two ranks and a cluster."""
    place = tmp_path_factory.mktemp("place")
    (place / "slurm").symlink_to(REPOSITORY / "slurm")
    make_run(place, 72, (1, 1), per_node=1)
    (place / "two.toml").write_text(CLUSTER)
    return place


@pytest.fixture(scope="module")
def slurm():
    with private_slurm(nodes=2, gpus=2) as sandbox:
        yield Sandbox(
            sandbox.directory,
            {**sandbox.environment, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"},
        )


def call(slurm: Sandbox, place: Path, *command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), cwd=place, env=slurm.environment, capture_output=True, text=True, timeout=600
    )


def submit(slurm: Sandbox, place: Path, *options: object) -> subprocess.CompletedProcess[str]:
    return call(slurm, place, sys.executable, *PDMPI, "submit", "run.toml", "--plan", "1-1.h5", *options)


def test_the_chain_is_stopped_in_the_middle_and_ends_with_one_whole_curve(slurm, place):
    run_dir = place / "chain"
    options = ("--nodes=2", "--ntasks-per-node=1", f"--output={run_dir}/job.log")
    said = call(slurm, place, "bash", "slurm/chain.sbatch", "run.toml", "two.toml", run_dir, *options)
    assert said.returncode == 0, said.stderr
    profile, plan, train = re.findall(r"\d+", said.stdout)
    for number in (profile, plan):
        job = slurm.wait(number, "COMPLETED", "FAILED", "CANCELLED", timeout_s=150)
        assert job["JobState"] == "COMPLETED", (place / Path(job["StdOut"]).name).read_text()
    wait_for_losses(run_dir, 6)
    slurm.run("scancel", "--signal=USR1", "--batch", train)
    job = slurm.wait(train, "COMPLETED", "FAILED", "CANCELLED", timeout_s=200)
    log = (run_dir / "job.log").read_text()
    assert job["JobState"] == "COMPLETED", log
    assert int(job["Restarts"]) >= 1
    assert "the run is requeue" in log
    assert "resumed from" in log
    curve = [(epoch, minibatch) for epoch, minibatch, _ in losses(run_dir)]
    assert len(curve) == 72
    assert curve == sorted(set(curve))


def wait_for_losses(run_dir: Path, count: int) -> None:
    deadline, path = time.monotonic() + 120, run_dir / "metrics.jsonl"
    while not path.exists() or path.read_text().count('"loss", ') < count:
        assert time.monotonic() < deadline, (run_dir / "job.log").read_text()
        time.sleep(0.05)


def test_a_broken_chain_is_cancelled(slurm, place):
    run_dir = place / "broken"
    (place / "bad.toml").write_text('[model]\nfactory = "nowhere:net"\n')
    said = call(slurm, place, "bash", "slurm/chain.sbatch", "bad.toml", "two.toml", run_dir)
    profile, plan, train = re.findall(r"\d+", said.stdout)
    assert slurm.wait(profile, "FAILED", "COMPLETED")["JobState"] == "FAILED"
    for number in (plan, train):
        assert slurm.wait(number, "CANCELLED", "COMPLETED")["JobState"] == "CANCELLED"


def test_submit_waits_for_a_job_of_two_nodes_and_its_dependency(slurm, place):
    first = slurm.run("sbatch", "--parsable", "--output=/dev/null", "--wrap", "sleep 1").strip()
    options = ("--run-dir", "sub mitted", "--dependency", f"afterok:{first}", "--wait")
    said = submit(slurm, place, *options, "--json")
    assert said.returncode == 0, said.stdout + said.stderr
    report = json.loads(said.stdout)
    assert (report["num_nodes"], report["ranks_per_node"]) == (2, 1)
    assert read_status(place / "sub mitted").job == report["job"]
    assert f"job {report['job']}: completed" in said.stderr
    assert "== requeued" not in Path(report["log"]).read_text()


def test_a_dry_run_submits_nothing_and_writes_nothing(slurm, place):
    before = slurm.run("squeue", "-h", "-t", "all", "-o", "%i")
    said = submit(slurm, place, "--run-dir", "dry", "--job-name", "$(touch pwned)\"'", "--dry-run")
    assert said.returncode == 0, said.stderr
    assert '#SBATCH --job-name="$(touch pwned)\\"\'"' in said.stdout
    assert "mpirun -n 2 --map-by ppr:1:node" in said.stdout
    assert "--resume auto" in said.stdout
    assert slurm.run("squeue", "-h", "-t", "all", "-o", "%i") == before
    assert not (place / "dry").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--partion", "x"], "--partition"),
        (["--launcher", "prun"], "srun-pmix"),
        (["--partition", "nowhere"], "sbatch: .*[Ii]nvalid partition"),
        (["--dependency", "afterok:1; touch pwned"], "must be like afterok:12"),
        (["--nodes", "3"], "the plan has 2 ranks"),
        (["--site", "none.toml"], "cannot read site file"),
        (["--environment", "A"], "write NAME=VALUE"),
    ],
)
def test_wrong_options_are_refused_in_one_line(slurm, place, options, message):
    said = submit(slurm, place, *options)
    assert said.returncode == 2
    assert re.search(message, said.stderr), said.stderr
    assert len(said.stderr.strip().splitlines()) == 1
    assert not (place / "pwned").exists()
