"""The one protocol between the runtime and whatever moves its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bound", "Bytes", "Request", "Transport"]

Bytes = NDArray[np.uint8]
"""A contiguous one-dimensional buffer on the host.  (Device buffers have the same shape.)"""


class Request(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Block until it is done; raise `RankFailure` when a peer is gone or silent too long."""


class Bound(Protocol):
    """A transfer or sum whose buffer and partners are fixed, to be started again and again."""

    def post(self) -> Request:
        """Start it; the request of the previous start has been waited for."""


class Transport(Protocol):
    """Point-to-point transfers in order, sums over groups, and small control messages.

    Messages between two ranks with the same ``tag`` and ``stream`` arrive in the order in
    which they were sent.  A message has exactly the length of the buffer posted for it;
    any other length is an error at the receiver.
    """

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def sums_on_device(self) -> bool:
        """Whether sums of device memory run on the device alone, so that a CUDA graph can hold them."""

    def prepare(self, groups: Sequence[Sequence[int]], dtypes: Sequence[str] = ()) -> None:
        """Set up sums over these groups, and try each dtype on known values in each of them.

        Every rank calls it with the same lists.  Only prepared groups can be summed over.
        """

    def allocate(self, nbytes: int) -> Bytes:
        """Return a buffer of zeros that transfers are fast from (``torch.from_dlpack`` takes it)."""

    def post_send(self, buffer: Bytes, peer: int, tag: int, stream: int) -> Request:
        """Start to send; ``stream`` is the channel's `Kind`.  The buffer stays untouched until waited for."""

    def post_recv(self, buffer: Bytes, peer: int, tag: int, stream: int) -> Request:
        """Start to receive exactly ``buffer.nbytes`` bytes."""

    def post_allreduce(self, buffer: Bytes, dtype: str, ranks: Sequence[int]) -> Request:
        """Start to sum in place over ``ranks`` (the same call on each of them, in the same order).

        ``dtype`` is torch's name; bfloat16 and float16 are summed in float32.  The result is
        bitwise the same on every rank.
        """

    def bind_send(self, buffer: Bytes, peer: int, tag: int, stream: int) -> Bound:
        """Return a `post_send` that can be repeated at little cost."""

    def bind_recv(self, buffer: Bytes, peer: int, tag: int, stream: int) -> Bound:
        """Return a `post_recv` that can be repeated at little cost."""

    def bind_allreduce(self, buffer: Bytes, dtype: str, ranks: Sequence[int]) -> Bound:
        """Return a `post_allreduce` that can be repeated at little cost."""

    def broadcast(self, data: bytes, root: int = 0) -> bytes:
        """Return ``root``'s bytes on every rank."""

    def gather(self, data: bytes, root: int = 0) -> list[bytes]:
        """Return every rank's bytes, by rank, on ``root``; an empty list elsewhere."""

    def barrier(self) -> None:
        """Wait for every rank."""

    def close(self) -> None:
        """End in order, on every rank, after all requests were waited for."""
