"""A job whose ranks pass messages round a ring until one of them fails in a given way.

Arguments: what happens, on which rank, and the timeouts for a transfer and for a sign of life, in seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import click
import numpy as np

from pdmpi.cli import main as entry
from pdmpi.errors import InputError, Requeue
from pdmpi.runtime.watch import Watch
from pdmpi.transport.mpi import MpiTransport


def fail(what: str) -> None:
    if what == "exception":
        raise ZeroDivisionError("boom")
    if what.startswith("exit-"):
        sys.exit(int(what.removeprefix("exit-")))
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "early-return":
        os._exit(0)


@click.command()
@click.argument("what")
@click.argument("culprit", type=int)
@click.argument("stall_timeout_s", type=float)
@click.argument("silence_timeout_s", type=float)
def job(what: str, culprit: int, stall_timeout_s: float, silence_timeout_s: float) -> None:
    transport = MpiTransport(stall_timeout_s)
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    mine, theirs = np.zeros(100_000, np.uint8), np.zeros(100_000, np.uint8)
    send, receive = transport.bind_send(mine, after, 0, 0), transport.bind_recv(theirs, before, 0, 0)
    with Watch(transport, f"stage {transport.rank}, replica 0") as watch:
        transport.describe = watch.describe
        with transport.heartbeat(silence_timeout_s):
            if transport.rank == 0:
                print("running", flush=True)
            for number in range(400 if what in ("nothing", "sleep") else 10**9):
                arriving, leaving = receive.post(), send.post()
                arriving.wait()
                leaving.wait()
                if number == 20 and what == "all-input-error":
                    raise InputError("bad knob")
                if number == 20 and what == "all-requeue":
                    raise Requeue("checkpointed")
                if number == 20 and transport.rank == culprit:
                    fail(what)
                if what == "sleep":
                    time.sleep(0.01)
    transport.close()


if __name__ == "__main__":
    entry.cli = job
    entry.main()
