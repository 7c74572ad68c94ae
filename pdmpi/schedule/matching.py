"""Which post on another rank every wait of a program is for.

Messages of one channel between two ranks keep their order, so the i-th receive is for the
i-th send; a wait is for the post of its own microbatch.  The i-th reduction over a group on
one rank is the i-th on each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdmpi.schedule.program import Op, Program

__all__ = ["NOBODY", "Matching", "Stream", "match", "streams"]

Indices = NDArray[np.int64]

NOBODY = np.iinfo(np.int64).min
"""The peer of a wait that needs nothing: its own post is missing."""


@dataclass(frozen=True, slots=True, order=True)
class Stream:
    """Messages of one channel from one rank to another."""

    channel: int
    source: int
    target: int


@dataclass(frozen=True)
class Matching:
    """For each rank, its waits and what each needs.

    Attributes
    ----------
    waits
        Row of each wait, ascending.
    peer
        Rank whose post each wait is for; ``-1 - group`` for a reduction; `NOBODY`.
    need
        Row of that post on ``peer``, past the last row where it is missing; for a reduction,
        its number among those of the group.
    """

    waits: tuple[Indices, ...]
    peer: tuple[Indices, ...]
    need: tuple[Indices, ...]


def streams(program: Program, op: Op) -> dict[Stream, Indices]:
    """Return the rows of one of the four message operations by stream, in order.

    Rows are the sending rank's for sends, the receiving rank's for receives.
    """
    sending = op in (Op.POST_SEND, Op.WAIT_SEND)
    found: dict[Stream, Indices] = {}
    num_ranks = program.topology.num_ranks
    for rank, rows in enumerate(program.rows):
        at = np.flatnonzero(rows[:, 0] == op)
        channel, peer = rows[at, 3].astype(np.int64), rows[at, 4].astype(np.int64)
        key = channel * num_ranks + peer
        order = np.argsort(key, kind="stable")
        for part in np.split(order, np.flatnonzero(np.diff(key[order])) + 1):
            if len(part):
                c, p = int(channel[part[0]]), int(peer[part[0]])
                found[Stream(c, rank, p) if sending else Stream(c, p, rank)] = at[part]
    return found


def match(program: Program) -> Matching:
    """Return what every wait is for, whatever else is wrong with the program."""
    peers = [np.full(len(rows), NOBODY) for rows in program.rows]
    needs = [np.zeros(len(rows), np.int64) for rows in program.rows]
    sends, receives = streams(program, Op.POST_SEND), streams(program, Op.POST_RECV)
    empty = np.empty(0, np.int64)

    def pair(rank: int, peer: int, waits: Indices, own: Indices, other: Indices) -> None:
        microbatch = program.rows[rank][:, 2]
        by_number = np.argsort(microbatch[own], kind="stable")
        posted = microbatch[own][by_number]
        spot = np.searchsorted(posted, microbatch[waits])
        has = spot < len(posted)
        has[has] = posted[spot[has]] == microbatch[waits[has]]
        number = by_number[spot[has]]
        partner = np.full(len(number), len(program.rows[peer]))
        there = number < len(other)
        partner[there] = other[number[there]]
        peers[rank][waits[has]] = peer
        needs[rank][waits[has]] = partner

    for stream, waits in streams(program, Op.WAIT_RECV).items():
        own, other = receives.get(stream, empty), sends.get(stream, empty)
        pair(stream.target, stream.source, waits, own, other)
    for stream, waits in streams(program, Op.WAIT_SEND).items():
        own, other = sends.get(stream, empty), receives.get(stream, empty)
        pair(stream.source, stream.target, waits, own, other)
    every = []
    for rank, rows in enumerate(program.rows):
        op = rows[:, 0]
        for group in range(len(program.groups)):
            at = np.flatnonzero((op == Op.WAIT_REDUCE) & (rows[:, 3] == group))
            peers[rank][at] = -1 - group
            needs[rank][at] = np.arange(len(at))
        every.append(np.flatnonzero((op == Op.WAIT_RECV) | (op == Op.WAIT_SEND) | (op == Op.WAIT_REDUCE)))
    return Matching(
        tuple(every),
        tuple(p[w] for p, w in zip(peers, every, strict=True)),
        tuple(n[w] for n, w in zip(needs, every, strict=True)),
    )
