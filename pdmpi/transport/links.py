"""Latency and bandwidth of the links between ranks, by ping-pong."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

import numpy as np

from pdmpi.transport.base import Bytes, Transport
from pdmpi.transport.share import share

__all__ = ["Link", "link_pairs", "measure_links"]

SMALL_BYTES, LARGE_BYTES = 8, 8 << 20
_BUDGET_S = 0.2
_MIN_REPEATS, _MAX_REPEATS = 3, 200
_TAG, _STREAM = 0, 0
_MAX_ALL_PAIRS = 8


@dataclass(frozen=True, slots=True)
class Link:
    """What a link did, one way, one message at a time.

    Attributes
    ----------
    source, target
        Ranks.
    memory
        ``"host"`` or ``"cuda"``: where the buffers lie.
    latency_s
        Median time of 8 bytes.
    bandwidth_bytes_per_s
        From the median time of 8 MiB.
    """

    source: int
    target: int
    memory: str
    latency_s: float
    bandwidth_bytes_per_s: float


def link_pairs(size: int) -> list[tuple[int, int]]:
    """Return the pairs to measure: all of a few ranks, neighbours of many."""
    if size <= _MAX_ALL_PAIRS:
        return list(combinations(range(size), 2))
    return [(rank, rank + 1) for rank in range(size - 1)]


def measure_links(
    transport: Transport,
    pairs: Sequence[tuple[int, int]],
    memory: str = "host",
    allocate: Callable[[int], Bytes] = lambda size: np.zeros(size, np.uint8),
) -> list[Link]:
    """Measure one pair after the other, all ranks together, and return the links on every rank.

    Parameters
    ----------
    pairs
        Ranks (source, target); the source keeps the time.
    memory, allocate
        Name of a kind of memory, and what returns a buffer of so many bytes in it.
    """
    mine = []
    for source, target in pairs:
        if transport.rank in (source, target):
            peer = target if transport.rank == source else source
            times_s = [
                _one_way_s(transport, peer, allocate(size), transport.rank == source)
                for size in (SMALL_BYTES, LARGE_BYTES)
            ]
            if transport.rank == source:
                mine.append(Link(source, target, memory, times_s[0], LARGE_BYTES / times_s[1]))
        transport.barrier()
    everything = share(transport, [asdict(link) for link in mine])
    found = [Link(**link) for part in everything for link in part]
    return sorted(found, key=lambda link: (link.source, link.target))


def _one_way_s(transport: Transport, peer: int, buffer: Bytes, leading: bool) -> float:
    """Return the median of half a round trip."""
    send = transport.bind_send(buffer, peer, _TAG, _STREAM)
    receive = transport.bind_recv(buffer, peer, _TAG, _STREAM)
    first, second = (send, receive) if leading else (receive, send)

    def round_trip_s() -> float:
        begin = time.perf_counter()
        first.post().wait()
        second.post().wait()
        return time.perf_counter() - begin

    round_trip_s()
    estimate_s = max(round_trip_s(), 1e-9)
    repeats = np.array([min(max(_BUDGET_S / estimate_s, _MIN_REPEATS), _MAX_REPEATS)], np.int64)
    agreed = repeats.view(np.uint8)
    post = transport.post_send if leading else transport.post_recv
    post(agreed, peer, _TAG, _STREAM).wait()
    return float(np.median([round_trip_s() for _ in range(int(repeats[0]))])) / 2
