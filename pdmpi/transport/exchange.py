"""Bandwidth of links with messages both ways at once, in a fraction of a second each.

A pipeline's activations and gradients cross, and so do the parts of a ring allreduce; a
ping-pong would not notice a link, or an MPI library, that serialises them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from pdmpi.transport.base import Bytes, Transport
from pdmpi.transport.share import share

__all__ = ["Exchange", "measure_exchanges", "rounds_of"]

_FIRST_BYTES, _LAST_BYTES = 16 << 10, 8 << 20
_LONG_S = 0.02
"""A message that takes so long is measured well enough, and has used up what a link lets pass at once."""
_REPEATS = 3
"""Long messages of which the fastest counts: a disturbance makes them slower, nothing makes them faster."""
_PATIENCE_S = 0.5
"""How long a link is given to reach half of what is expected of it, with longer and longer messages."""
_TAG, _STREAM = 0, 0


@dataclass(frozen=True, slots=True)
class Exchange:
    """Two ranks, and the bytes a second that their link moved each way, both ways at once."""

    source: int
    target: int
    bandwidth_bytes_per_s: float


def rounds_of(pairs: Sequence[tuple[int, int]], hosts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Divide pairs of ranks into rounds in which no host has a part in two of them."""
    rounds: list[list[tuple[int, int]]] = []
    for pair in pairs:
        ends = {hosts[rank] for rank in pair}
        free = (found for found in rounds if not any(hosts[r] in ends for other in found for r in other))
        found = next(free, None)
        if found is None:
            rounds.append([pair])
        else:
            found.append(pair)
    return rounds


def measure_exchanges(
    transport: Transport, pairs: Sequence[tuple[int, int]], hosts: Sequence[str], expected: Sequence[float]
) -> list[Exchange]:
    """Measure the links between pairs of ranks, all ranks together; the same on every rank.

    Parameters
    ----------
    pairs
        Ranks (source, target).
    hosts
        Name of each rank's host: a host measures one link at a time.
    expected
        Bytes a second of each pair: a measurement that stays below half of it goes on with
        longer messages, since latency or something else may have disturbed it.
    """
    mine: list[Exchange] = []
    wanted = dict(zip(pairs, expected, strict=True))
    transport.barrier()
    for pair in (pair for found in rounds_of(pairs, hosts) for pair in (*found, None)):
        if pair is None:
            transport.barrier()
        elif transport.rank in pair:
            rate = _rate(transport, pair, wanted[pair])
            if transport.rank == pair[0]:
                mine.append(Exchange(*pair, rate))
    everything = share(transport, [asdict(found) for found in mine])
    found = {(e["source"], e["target"]): Exchange(**e) for part in everything for e in part}
    return [found[pair] for pair in pairs]


def _rate(transport: Transport, pair: tuple[int, int], expected: float) -> float:
    """Return the best rate of messages that took long enough to be measured."""
    leads = transport.rank == pair[0]
    peer = pair[1] if leads else pair[0]
    arriving, leaving = (transport.allocate(_LAST_BYTES) for _ in range(2))
    for buffer in (arriving, leaving):
        buffer.fill(0)  # else the first to touch its pages would be the messages
    _exchange_s(transport, peer, arriving[:_FIRST_BYTES], leaving[:_FIRST_BYTES])  # connects them
    began = time.perf_counter()
    nbytes, rates, repeats = _FIRST_BYTES, [0.0], 0
    while nbytes:
        spent_s = _exchange_s(transport, peer, arriving[:nbytes], leaving[:nbytes])
        is_last = nbytes == _LAST_BYTES
        if spent_s > _LONG_S or is_last:
            rates.append(nbytes / spent_s)
            repeats += 1
        else:
            rates, repeats = [0.0], _REPEATS  # what seemed long at this size was a disturbance
        following = nbytes
        if repeats == _REPEATS:
            is_done = max(rates) > expected / 2 or is_last or time.perf_counter() - began > _PATIENCE_S
            following, repeats = 0 if is_done and max(rates) else 2 * nbytes, 0
        nbytes = _agreed(transport, peer, leads, following)
    return max(rates)


def _exchange_s(transport: Transport, peer: int, arriving: Bytes, leaving: Bytes) -> float:
    begin = time.perf_counter()
    receive = transport.post_recv(arriving, peer, _TAG, _STREAM)
    send = transport.post_send(leaving, peer, _TAG, _STREAM)
    receive.wait()
    send.wait()
    return time.perf_counter() - begin


def _agreed(transport: Transport, peer: int, leads: bool, following: int) -> int:
    """Return the size that the leading rank chose."""
    size = np.array([following], np.int64)
    post = transport.post_send if leads else transport.post_recv
    post(size.view(np.uint8), peer, _TAG, _STREAM).wait()
    return int(size[0])
