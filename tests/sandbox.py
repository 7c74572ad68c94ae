"""A private Slurm for tests that need a real one."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch import MPI_ENVIRONMENT, REPOSITORY

__all__ = ["Sandbox", "private_slurm"]

TOOL = REPOSITORY / "tools" / "slurm-sandbox"


@dataclass(frozen=True)
class Sandbox:
    """A running Slurm: call its commands with `run`."""

    directory: Path
    environment: Mapping[str, str]

    def run(self, *command: object, text: str = "", check: bool = True) -> str:
        done = subprocess.run(
            [str(part) for part in command],
            input=text,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if check and done.returncode:
            pytest.fail(f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, script: str) -> str:
        return self.run("sbatch", "--parsable", text=script).strip()

    def job(self, number: str) -> dict[str, str]:
        shown = self.run("scontrol", "show", "job", "-o", number).split()
        return dict(part.partition("=")[::2] for part in shown)

    def start_now(self, number: str) -> bool:
        """Do not wait out the two minutes that Slurm holds a requeued job back; tell whether it agreed.

        Slurm refuses to start a job again within the second in which it was killed, and to
        change one that is not wholly gone from its nodes.
        """
        update = ["scontrol", "update", f"JobId={number}", "StartTime=now+2"]
        return not subprocess.run(update, env=self.environment, capture_output=True, timeout=300).returncode

    def wait(self, number: str, *states: str, timeout_s: float = 60.0) -> dict[str, str]:
        """Wait until a job is in one of the states; a requeued job is started at once."""
        deadline, hasten_again = time.monotonic() + timeout_s, 0.0
        while True:
            job = self.job(number)
            if job["JobState"] in states:
                return job
            held = job["JobState"] == "PENDING" and job["Reason"] == "BeginTime"
            if held and time.monotonic() > hasten_again and self.start_now(number):
                hasten_again = time.monotonic() + 6
            if time.monotonic() > deadline:
                log = Path(job["StdOut"])
                shown = log.read_text() if log.is_file() else "(no log)"
                pytest.fail(f"job {number} is {job['JobState']} ({job['Reason']}), not {states}:\n{shown}")
            time.sleep(0.1)


@contextlib.contextmanager
def private_slurm(nodes: int = 2, gpus: int = 2) -> Iterator[Sandbox]:
    """Start a Slurm of its own and stop it; its jobs find this Python and its MPI."""
    directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        subprocess.run([TOOL, "start", directory, str(nodes), str(gpus)], check=True, timeout=300)
        outer = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "OMPI_", "PMI"))}
        environment = (
            outer
            | MPI_ENVIRONMENT["openmpi"]
            | {
                "SLURM_CONF": str(directory / "slurm.conf"),
                "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}",
                "PYTHONPATH": str(REPOSITORY),
            }
        )
        yield Sandbox(directory, environment)
    finally:
        subprocess.run([TOOL, "stop", directory], timeout=300)
        shutil.rmtree(directory, ignore_errors=True)
