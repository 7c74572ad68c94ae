"""Training over two hosts that share nothing but a link and a directory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from faults.fault_run import make_run, newest
from launch import PDMPI, REPOSITORY, each_mpi, of_each_mpi

from pdmpi.checkpoint.status import read_status
from tools.lib.hosts import Lab

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]

ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(str(REPOSITORY / part) for part in (".", "tests", "tests/runtime"))
}
LIMIT_S = 90.0
"""For the end of a job that lost a host: its own timeout, and 20 s for a launcher that hangs."""

STALL_TIMEOUT_S = 8


def run(lab: Lab, mpi: str, *arguments: object) -> str:
    done = lab.run(2, [*map(str, arguments)], mpi, ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@each_mpi
def test_weights_equal_the_oracle(lab: Lab, mpi: str) -> None:
    cases = [["conv", "pipedream", 1, [1, 1], 12, {}], ["conv", "data-parallel", 1, [2], 12, {}]]
    printed = run(lab, mpi, REPOSITORY / "tests" / "runtime" / "mpi_oracle.py", json.dumps(cases), "cpu")
    assert printed.count("equal") == len(cases)


@pytest.mark.mpi
def test_a_link_that_is_not_the_plans_is_told(lab: Lab) -> None:
    """A link of 40 Mbit/s, for plans that expect as much, and ten times as much or as little."""
    lab.rate("40mbit")
    try:
        printed = run(lab, "openmpi", Path(__file__).with_name("notes_job.py"), 5e6, 50e6, 0.5e6)
    finally:
        lab.rate("400mbit")
    lines = [json.loads(line) for line in printed.splitlines() if '"notes"' in line]
    as_planned, slower, faster = (line["notes"] for line in lines)
    assert as_planned == []
    assert re.search(
        r"warning: the network is \d+\.\d times slower than the plan's: stage 0 to 1 \(rank 0 on h1, "
        r"rank 1 on h2\) moves [\d.]+ MB/s each way at once, the plan's 'network' 50 MB/s; measure it "
        r"\(mpirun -n 2 pdmpi cluster\) and plan again",
        slower[0],
    )
    assert "times faster than the plan's" in faster[0]


@pytest.mark.parametrize(("mpi", "what"), of_each_mpi(openmpi=[("cut",)], mpich=[("freeze",)]))
def test_a_slow_host_goes_on_and_a_lost_one_ends_the_job(lab: Lab, mpi: str, what: str) -> None:
    directory = lab.directory / what
    directory.mkdir()
    make_run(directory, 100_000, (1, 1))
    config = directory / "run.toml"
    config.write_text(config.read_text().replace("timeout_s = 60", f"timeout_s = {STALL_TIMEOUT_S}"))
    arguments = ("train", config, "--plan", directory / "1-1.h5", "--run-dir", directory / "run")
    job = lab.start(2, [*PDMPI, *map(str, arguments)], mpi, ENVIRONMENT)
    try:
        wait_for(job, directory / "run", 6)
        lab.rate("40mbit", "h2")
        wait_for(job, directory / "run", newest(directory / "run").manifest.minibatch + 12)
        getattr(lab, what)("h2")
        _, stderr = job.communicate(timeout=LIMIT_S)
    finally:
        lab.kill()
        lab.mend("h2")
        lab.rate("400mbit")
    assert job.returncode != 0, stderr
    assert re.search(
        r"pdmpi: error: .*rank [01] \(stage [01], replica 0, host h[12], pid \d+\).*"
        rf"(nothing for {STALL_TIMEOUT_S} s|gave no sign of life for \d+ s)",
        stderr,
    )
    status = read_status(directory / "run")
    assert status is not None
    assert status.status == "running"  # it died without a word there; a batch script resumes it
    assert newest(directory / "run").manifest.minibatch >= 18


def wait_for(job: subprocess.Popen[str], run_dir: Path, minibatch: int) -> None:
    """Wait for a checkpoint at or behind a minibatch."""
    deadline = time.monotonic() + 240
    found = -1
    while found < minibatch:
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline, f"no checkpoint at {minibatch}, the last is at {found}"
        time.sleep(0.2)
        if list(run_dir.glob("checkpoints/step-*/manifest.json")):
            found = newest(run_dir).manifest.minibatch
