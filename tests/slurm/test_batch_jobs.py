"""The batch script under a real Slurm: it requeues what was checkpointed or died, and nothing else."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from sandbox import Sandbox, private_slurm

from pdmpi.slurm.commands import submit
from pdmpi.slurm.options import JobOptions
from pdmpi.slurm.script import Job, job_script
from pdmpi.slurm.shape import JobShape

pytestmark = [pytest.mark.slurm, pytest.mark.mpi]

STAND_IN = Path(__file__).with_name("stand_in.py")


@pytest.fixture(scope="module")
def slurm():
    with private_slurm(nodes=2, gpus=2) as sandbox:
        yield sandbox


def start(slurm: Sandbox, run_dir: Path, *what: str, name: str = "test", **options) -> str:
    shape = JobShape(num_ranks=3, num_nodes=2, ranks_per_node=2)
    job = Job(
        name=name,
        shape=shape,
        uses_gpus=True,
        command=(sys.executable, str(STAND_IN), str(run_dir), *what),
        directory=run_dir,
        run_dir=run_dir,
        options=JobOptions(environment={"EXPECTED_RANKS": "3"}, **options),
    )
    return submit(job_script(job), slurm.environment)


def log_of(run_dir: Path) -> str:
    return (run_dir / "job.log").read_text()


def restarts_of(job: dict[str, str], log: str) -> int:
    """Return the restarts but for those of launchers that failed before their ranks met."""
    starts = log.split("== job ")[1:]
    return int(job["Restarts"]) - sum("rank 0 of" not in start for start in starts)


@pytest.mark.parametrize(
    ("launcher", "moment"),
    [("mpirun", "job.log"), ("mpirun", "status.json"), ("srun-pmix", "status.json")],
)
def test_a_job_is_told_to_stop_comes_back_and_is_done(slurm, tmp_path, launcher, moment):
    """While the ranks are still importing, or when they work, and whatever the launcher."""
    number = start(slurm, tmp_path, "work", "done", launcher=launcher)
    wait_for(tmp_path / moment, "start 0" if moment == "job.log" else "running")
    slurm.run("scancel", "--signal=USR1", "--batch", number)
    job = slurm.wait(number, "COMPLETED", "FAILED", "CANCELLED")
    log = log_of(tmp_path)
    assert job["JobState"] == "COMPLETED", log
    assert restarts_of(job, log) == 1, log  # Slurm itself may fail to start a step so soon
    assert "the run is requeue" in log
    assert len(re.findall(r"rank \d of 3: work", log)) == 3
    assert len(re.findall(r"rank \d of 3: done", log)) == 3


def test_a_death_is_requeued_until_it_gets_no_further(slurm, tmp_path):
    number = start(slurm, tmp_path, "checkpoint-die", "die", "die", max_deaths=1)
    job = slurm.wait(number, "COMPLETED", "FAILED", "CANCELLED", timeout_s=90)
    log = log_of(tmp_path)
    assert (job["JobState"], job["Restarts"]) == ("FAILED", "2"), log
    assert "died 2 times without a new checkpoint (max_deaths = 1): giving up" in log


def test_a_silent_end_with_code_0_is_a_death(slurm, tmp_path):
    number = start(slurm, tmp_path, "nothing", "done")
    job = slurm.wait(number, "COMPLETED", "FAILED")
    log = log_of(tmp_path)
    assert (job["JobState"], restarts_of(job, log)) == ("COMPLETED", 1), log
    assert "launcher returned 0, the run is running" in log


def test_a_cancelled_job_stays_cancelled(slurm, tmp_path):
    number = start(slurm, tmp_path, "work", "done")
    wait_for(tmp_path / "status.json", "running")
    slurm.run("scancel", number)
    slurm.wait(number, "CANCELLED")
    time.sleep(8)
    job = slurm.job(number)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0"), log_of(tmp_path)


def wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + 600
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_bad_input_is_not_tried_again(slurm, tmp_path):
    job = slurm.wait(start(slurm, tmp_path, "bad-input"), "COMPLETED", "FAILED")
    assert (job["JobState"], job["Restarts"], job["ExitCode"]) == ("FAILED", "0", "2:0"), log_of(tmp_path)


def test_restarts_are_bounded(slurm, tmp_path):
    job = slurm.wait(start(slurm, tmp_path, "nothing", "nothing", max_restarts=1), "FAILED", "COMPLETED")
    assert job["Restarts"] == "1"
    assert "requeued 1 times already (max_restarts = 1): giving up" in log_of(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        '$(touch pwned)"; touch pwned #',
        "`touch pwned`",
        "' ; touch pwned ; '",
        "\" --wrap='touch pwned'",
        "%j%x a",
    ],
)
def test_a_hostile_name_and_path_run_nothing(slurm, tmp_path, text):
    run_dir = tmp_path / text.replace("/", "_")
    run_dir.mkdir()
    number = start(slurm, run_dir, "done", name=text, job_name=text)
    job = slurm.wait(number, "COMPLETED", "FAILED")
    assert job["JobState"] == "COMPLETED", slurm.run("scontrol", "show", "job", number)
    assert f"JobName={text}" in slurm.run("scontrol", "show", "job", number)
    assert "the run is done" in log_of(run_dir)
    assert not list(tmp_path.rglob("pwned"))
