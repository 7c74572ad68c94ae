"""What every rank has to say, known to every rank."""

from __future__ import annotations

import json
from typing import Any

from pdmpi.transport.base import Transport

__all__ = ["share"]


def share(transport: Transport, mine: Any) -> list[Any]:
    """Return what each rank said, by rank; every rank calls it at the same time.

    Parameters
    ----------
    transport
        Of the ranks.
    mine
        What JSON can hold.
    """
    parts = transport.gather(json.dumps(mine).encode())
    everything = transport.broadcast(b"[" + b",".join(parts) + b"]")
    return list(json.loads(everything))
