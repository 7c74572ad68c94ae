"""Stands for `pdmpi train` in tests of the batch script: ranks that end in a given way at each start.

Arguments: the run's directory, then what happens at the first start, the second, ... (the last one again
and again). A start counts once its ranks have met: a launcher that fails before leaves the next its turn.
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
    world, met = MPI.COMM_WORLD, run_dir / "met"
    if world.size != int(os.environ["EXPECTED_RANKS"]):
        raise SystemExit(f"{world.size} ranks")

    def say(status: str) -> None:
        if world.rank == 0:
            write_status(run_dir, RunStatus(status=status, job=job.job, restarts=job.restarts))  # type: ignore

    with StopRequest(["USR1"]) as stop:
        starts = world.bcast(len(met.read_text()) if met.exists() else 0)
        world.Barrier()
        what = sys.argv[2:][: starts + 1][-1]
        if world.rank == 0:
            met.write_text("." * (starts + 1))
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
