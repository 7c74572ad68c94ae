"""Stands for `pdmpi train` in tests of the batch script: ranks that end in a given way at each start.

Arguments: the run's directory, then what happens at start 0, 1, ... (the last one again and again)
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from mpi4py import MPI

from pdmpi.checkpoint.status import RunStatus, write_status
from pdmpi.slurm.environment import JobEnvironment
from pdmpi.slurm.signals import StopRequest


def main() -> None:
    run_dir, job = Path(sys.argv[1]), JobEnvironment.of(os.environ)
    what, world = sys.argv[2:][: job.restarts + 1][-1], MPI.COMM_WORLD
    if world.size != int(os.environ["EXPECTED_RANKS"]):
        raise SystemExit(f"{world.size} ranks")

    def say(status: str) -> None:
        if world.rank == 0:
            write_status(run_dir, RunStatus(status=status, job=job.job, restarts=job.restarts))  # type: ignore

    with StopRequest(["USR1"]) as stop:
        world.Barrier()
        say("running")
        print(f"rank {world.rank} of {world.size}: {what}", flush=True)
        if what.startswith("checkpoint") and world.rank == 0:
            (run_dir / "checkpoints" / f"step-{job.restarts:012d}").mkdir(parents=True)
        if what.endswith("die") and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "bad-input":
            say("failed")
            raise SystemExit(2)
        if what == "work":
            while not world.allreduce(bool(stop.reason()), MPI.LOR):
                time.sleep(0.05)
            say("requeue")
            MPI.Finalize()
            os._exit(75)
        if what.endswith("die"):
            time.sleep(60)
        if what == "done":
            say("done")


main()
