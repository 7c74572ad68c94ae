"""How a run ended, in a file that a batch script can read.

A launcher's exit code cannot be trusted: ``mpirun`` returns 0 when one of its daemons is
killed, and when a signal ends the job.  So rank 0 says itself how the run stands, in
``status.json``; a run that died without a word is still ``running`` there.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from pdmpi.checkpoint.files import write_bytes

__all__ = ["STATUS", "RunStatus", "State", "read_status", "write_status"]

STATUS = "status.json"
"""Name of the file in the run's directory."""

State = Literal["running", "done", "requeue", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """How a run stands.

    Attributes
    ----------
    status
        ``running``, ``done``, ``requeue`` (checkpointed, wants to go on) or ``failed``.
    minibatch
        Minibatches trained.
    reason
        Why it stopped, as one line.
    job
        Batch job's id, empty outside of one.
    restarts
        Times that the job had been requeued.
    """

    status: State
    minibatch: int = 0
    reason: str = ""
    job: str = ""
    restarts: int = 0


def write_status(run_dir: Path, status: RunStatus) -> None:
    """Say how the run stands; the file holds one line, so that ``sed`` can read it."""
    write_bytes(run_dir / STATUS, json.dumps(asdict(status)).encode() + b"\n")


def read_status(run_dir: Path) -> RunStatus | None:
    """Return how the run stands, None if nothing (or nothing readable) says so."""
    try:
        status = RunStatus(**json.loads((run_dir / STATUS).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return status if status.status in get_args(State) else None
