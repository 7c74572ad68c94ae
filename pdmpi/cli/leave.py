"""Ending a process so that no other rank is left waiting for it."""

from __future__ import annotations

import os
import sys
import time
from types import ModuleType
from typing import NoReturn

from pdmpi.errors import InputError

__all__ = ["leave"]

_GRACE_S, _INPUT_GRACE_S = 2.0, 8.0
"""How long a failed rank waits for the others to fail as well before it aborts them; longer where all
ranks check the same input, which they read at different speeds."""

_FORWARD_S = 0.2
"""How long a launcher is given to forward the last line: MPICH's drops what is left at an abort."""


def leave(code: int, message: str = "") -> NoReturn:
    """Show ``message`` on stderr and exit with ``code``.

    In a world of several ranks an exit of one alone would leave the others waiting for
    ever.  When all ranks fail together (bad input that each was told of), the message is
    shown once and each exits with its code; when one fails alone, the world is aborted
    with its code.  A process that never started MPI just exits: mpi4py is looked up, not
    imported.
    """
    sys.stdout.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if code and mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        _leave_world(mpi, code, message)
    elif message:
        print(message, file=sys.stderr)
    sys.exit(code)


def _leave_world(mpi: ModuleType, code: int, message: str) -> None:
    world = mpi.COMM_WORLD
    arrived = world.Ibarrier()
    deadline = time.monotonic() + (_INPUT_GRACE_S if code == InputError.exit_code else _GRACE_S)
    while not arrived.Test():
        if time.monotonic() > deadline:
            print(f"{message} [rank {world.rank}]", file=sys.stderr, flush=True)
            time.sleep(_FORWARD_S)
            world.Abort(code)
            os._exit(code)  # should an abort return after all
        time.sleep(0.01)
    earlier = world.allgather(message)[: world.rank]
    if message and message not in earlier:
        print(message, file=sys.stderr, flush=True)
