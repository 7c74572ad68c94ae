"""Rank 0 reads, everybody knows: files are read once and their errors are everybody's."""

from __future__ import annotations

from collections.abc import Callable

from pdmpi.errors import InputError
from pdmpi.transport.base import Transport

__all__ = ["from_rank_0"]


def from_rank_0(transport: Transport, read: Callable[[], bytes]) -> bytes:
    """Return on every rank what ``read`` returns on rank 0.

    Raises
    ------
    InputError
        On every rank, when ``read`` raises it on rank 0.
    """
    packed = b""
    if transport.rank == 0:
        try:
            packed = b"+" + read()
        except InputError as error:
            packed = b"-" + str(error).encode()
    packed = transport.broadcast(packed)
    if packed[:1] == b"-":
        raise InputError(packed[1:].decode())
    return packed[1:]
