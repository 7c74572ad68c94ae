"""Whether all ranks of a job compute on the same kind of device."""

from __future__ import annotations

import json
import os

from pdmpi.errors import InputError
from pdmpi.transport.mpi import MpiTransport

__all__ = ["refuse_mixed_places"]


def refuse_mixed_places(transport: MpiTransport, has_device: bool) -> None:
    """Compare what every rank found; all ranks call it at the same time.

    Raises
    ------
    InputError
        On every rank, if only some see a CUDA device.
    """
    told = json.dumps([os.uname().nodename, has_device]).encode()
    places = json.loads(transport.broadcast(b"[" + b",".join(transport.gather(told)) + b"]"))
    without = [f"rank {rank} on host {host}" for rank, (host, has) in enumerate(places) if not has]
    if without and len(without) < len(places):
        raise InputError(
            f"device = 'auto', but {without[0]} sees no CUDA device and other ranks do; start no more ranks "
            "on a host than it has devices (and CuPy), or set [train] device = 'cpu'"
        )
