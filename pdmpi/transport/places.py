"""Whether all ranks of a job compute on the same kind of device."""

from __future__ import annotations

import os

from pdmpi.errors import InputError
from pdmpi.transport.base import Transport
from pdmpi.transport.share import share

__all__ = ["refuse_mixed_places"]


def refuse_mixed_places(transport: Transport, has_device: bool) -> None:
    """Compare what every rank found; all ranks call it at the same time.

    The transport is closed where that does not fit.

    Raises
    ------
    InputError
        On every rank, if only some see a CUDA device.
    """
    places = share(transport, [os.uname().nodename, has_device])
    without = [f"rank {rank} on host {host}" for rank, (host, has) in enumerate(places) if not has]
    if without and len(without) < len(places):
        transport.close()
        raise InputError(
            f"device = 'auto', but {without[0]} sees no CUDA device (or lacks CuPy) and other ranks do; "
            "start ranks where there are devices, or give device 'cpu'"
        )
