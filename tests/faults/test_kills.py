"""A job under a real Slurm whose ranks are killed at random moments, and one of whose nodes fails.

``PDMPI_FAULT_KILLS`` says how many faults (3 by default).
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from faults.fault_run import PAUSE, assert_same_run, losses, make_run, newest, train
from launch import PDMPI, REPOSITORY
from sandbox import Sandbox, private_slurm

from pdmpi.checkpoint import latest
from pdmpi.checkpoint.status import read_status

pytestmark = [pytest.mark.slurm, pytest.mark.mpi, pytest.mark.timeout(14_400)]

HANGS_S = 900.0
"""A start of three ranks takes minutes on a machine that others use as well."""

FAULTS = int(os.environ.get("PDMPI_FAULT_KILLS", "3"))
STEPS = 24 * 4 * FAULTS


def processes(slurm: Sandbox) -> list[tuple[int, str]]:
    """Return (process id, rank) of all ranks of the sandbox's jobs."""
    found = []
    ours = f"SLURM_CONF={slurm.environment['SLURM_CONF']}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environ = (path / "environ").read_bytes().split(b"\0")
            command = (path / "cmdline").read_bytes()
        except OSError:
            continue
        rank = [line for line in environ if line.startswith(b"OMPI_COMM_WORLD_RANK=")]
        if rank and ours in environ and b"train" in command and b"guardian" not in command:
            found.append((int(path.name), rank[0].partition(b"=")[2].decode()))
    return found


def wait_until(condition, *arguments: object) -> None:
    deadline = time.monotonic() + HANGS_S
    while not condition(*arguments):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def moment(run_dir: Path, running: bool) -> str:
    """Return what a start of the job is doing."""
    if not running:
        return "starting or ending"
    return "writing a checkpoint" if list((run_dir / "checkpoints").glob(".writing-*")) else "training"


def kill_a_rank(slurm: Sandbox, chance: random.Random, run_dir: Path, restarts: int) -> str:
    """Kill a random rank at whatever it is doing; return what it was."""
    ranks = processes(slurm)
    if not ranks:
        return ""
    pid, rank = chance.choice(sorted(ranks))
    doing = moment(run_dir, is_running(run_dir, restarts))
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return ""
    return f"rank {rank} killed while {doing}"


def fail_a_node(slurm: Sandbox, number: str) -> str:
    before = int(slurm.job(number)["Restarts"])
    slurm.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    wait_until(gone, slurm, number, before)
    slurm.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    return "node down"


def test_whatever_dies_the_requeued_job_ends_as_if_nothing_had(tmp_path):
    make_run(tmp_path, STEPS, (2, 1), per_node=2)
    code, said = train(tmp_path, "2-1", tmp_path / "whole", timeout_s=4 * HANGS_S)
    assert code == 0, said
    chance, survived, run_dir = random.Random(7), Counter[str](), tmp_path / "run"
    with private_slurm(nodes=2, gpus=0) as slurm:
        path = f"{REPOSITORY}:{REPOSITORY / 'tests'}"
        environment = {**slurm.environment, "PYTHONPATH": path, PAUSE: "0.0025"}
        submitted = subprocess.run(
            [sys.executable, *PDMPI, "submit", "run.toml", "--plan", "2-1.h5", "--run-dir", run_dir, "--json",
             "--max-deaths", "1000", "--max-restarts", "1000"],
            cwd=tmp_path, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert submitted.returncode == 0, submitted.stderr
        number = json.loads(submitted.stdout)["job"]
        while sum(survived.values()) < FAULTS:
            job = slurm.wait(number, "RUNNING", "COMPLETED", "FAILED", timeout_s=HANGS_S)
            assert job["JobState"] != "FAILED", (run_dir / "job.log").read_text()
            if job["JobState"] == "COMPLETED":
                break
            restarts = int(job["Restarts"])
            if chance.random() < 0.75 or not survived:
                wait_until(running_or_gone, slurm, number, restarts, run_dir)
                further = chance.randrange(3) if survived else 1  # checkpoints, however slow the machine is
                wait_until(further_or_gone, slurm, number, restarts, run_dir, reached(run_dir) + 6 * further)
            time.sleep(chance.uniform(0, 1.0))
            if sum(survived.values()) == 2:
                fault = fail_a_node(slurm, number)
            else:
                fault = kill_a_rank(slurm, chance, run_dir, restarts)
            if fault:
                survived[fault] += 1
                print(f"{time.strftime('%X')} {fault}, restart {restarts}", flush=True)
                wait_until(gone, slurm, number, restarts)
        job = slurm.wait(number, "COMPLETED", "FAILED", "CANCELLED", timeout_s=4 * HANGS_S)
    log = (run_dir / "job.log").read_text()
    assert job["JobState"] == "COMPLETED", log
    print(f"survived {dict(survived)} with {job['Restarts']} restarts")
    assert sum(survived.values()) == FAULTS
    assert int(job["Restarts"]) >= FAULTS
    assert_same_run(tmp_path / "whole", run_dir)
    assert len(losses(run_dir)) == newest(run_dir).manifest.minibatch
    assert re.search(r"resumed from \S+step-\d+", log)


def running_or_gone(slurm: Sandbox, number: str, restarts: int, run_dir: Path) -> bool:
    return is_running(run_dir, restarts) or gone(slurm, number, restarts)


def reached(run_dir: Path) -> int:
    """Return the minibatch of the newest checkpoint; 0 before the first."""
    found = latest(run_dir)
    return 0 if found is None else found.manifest.minibatch


def further_or_gone(slurm: Sandbox, number: str, restarts: int, run_dir: Path, minibatch: int) -> bool:
    return reached(run_dir) >= minibatch or gone(slurm, number, restarts)


def is_running(run_dir: Path, restarts: int) -> bool:
    status = read_status(run_dir)
    return status is not None and status.status == "running" and status.restarts == restarts


def gone(slurm: Sandbox, number: str, restarts: int) -> bool:
    job = slurm.job(number)
    return job["JobState"] != "RUNNING" or int(job["Restarts"]) > restarts
