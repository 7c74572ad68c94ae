"""Checks that every rank of a job runs one after the other; the first that fails ends the job."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any


def run_checks(checks: Sequence[Callable[..., object]], transport: Any, *context: Any) -> None:
    """Let rank 0 print the name of each check that all ranks have passed.

    A rank on which a check fails says so and ends the others: they may wait for it, and what they
    would do next belongs to another check than what it would do.
    """
    for check in checks:
        try:
            check(transport, *context)
        except BaseException:  # pytest's own failures, too
            print(f"{check.__name__} failed on rank {transport.rank}:", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            time.sleep(1)  # MPICH's launcher drops what is left at an abort
            transport.abort(1)
        transport.barrier()
        if transport.rank == 0:
            print("passed", check.__name__, flush=True)
    transport.close()
