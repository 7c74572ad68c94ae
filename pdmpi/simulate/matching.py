"""Messages and reductions of a program as numbered events, with the rows that post and await them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdmpi.errors import PdmpiError
from pdmpi.schedule.matching import Stream, streams
from pdmpi.schedule.program import Instruction, Op, Program, Rows

__all__ = ["ALWAYS", "NEVER", "NUM_CONSTANT_EVENTS", "Events", "Ints", "Mentions", "match"]

Ints = NDArray[np.int64]

ALWAYS = 0
"""The event that has always happened."""
NEVER = 1
"""The event that never happens."""
NUM_CONSTANT_EVENTS = 2
"""Events before the first message."""


@dataclass(frozen=True)
class Mentions:
    """Where the rows of one rank post events and wait for them.

    Attributes
    ----------
    post_row, post_event
        Rows at whose end an event is posted, in order of rows: sends, receives, and the
        backwards that a reduction overlaps.
    post_leads
        Whether the post is that of the first bucket of a reduction, made before the row's end.
    wait_row, wait_event
        Rows that wait and the event each waits for, in order of rows; a wait for a
        reduction is there twice, once for each of its events.
    """

    post_row: Ints
    post_event: Ints
    post_leads: NDArray[np.bool_]
    wait_row: Ints
    wait_event: Ints


@dataclass(frozen=True)
class Events:
    """All events of a program.

    Events are numbered channel by channel and, inside one, in the order of the streams' first
    microbatches, so that the numbers do not depend on how ranks are numbered.

    Attributes
    ----------
    mentions
        One entry a rank.
    messages
        Events of each stream: its i-th message is event ``range[i]``.
    reductions
        Events of each group.  Its n-th reduction has two: ``range[2 n]`` for all its buckets one
        after the other, from when the first is there on all ranks; ``range[2 n + 1]`` for
        its last bucket alone, from when the backwards have ended on all ranks.  It is over
        when both have happened.
    count
        Number of events.
    """

    mentions: tuple[Mentions, ...]
    messages: dict[Stream, range]
    reductions: tuple[range, ...]
    count: int


def match(program: Program) -> Events:
    """Number all events of a program and find their posts and waits.

    Raises
    ------
    PdmpiError
        When a wait has no post of its microbatch.
    """
    event = [np.full(len(rows), NEVER, np.int64) for rows in program.rows]
    messages = _number_messages(program, event)
    first = NUM_CONSTANT_EVENTS + sum(map(len, messages.values()))
    reductions = []
    for group in range(len(program.groups)):
        numbers = range(first, first + 2 * _number_reductions(program.rows, group, first, event))
        reductions.append(numbers)
        first = numbers.stop
    overlaps = np.array([group.sums_gradients for group in program.groups], bool)
    mentions = [_mentions(rows, numbers, overlaps) for rows, numbers in zip(program.rows, event, strict=True)]
    return Events(tuple(mentions), messages, tuple(reductions), first)


def _number_messages(program: Program, event: list[Ints]) -> dict[Stream, range]:
    """Write the number of its message into ``event`` of each row that posts or awaits one."""
    posts = {op: streams(program, op) for op in (Op.POST_SEND, Op.POST_RECV)}
    waits = {op: streams(program, op) for op in (Op.WAIT_SEND, Op.WAIT_RECV)}
    entered: dict[Stream, int] = {}
    for op, found in (posts | waits).items():
        for stream, rows in found.items():
            rank = stream.source if op in (Op.POST_SEND, Op.WAIT_SEND) else stream.target
            entered.setdefault(stream, int(program.rows[rank][rows[0], 2]))
    none = np.zeros(0, np.int64)
    messages: dict[Stream, range] = {}
    first = NUM_CONSTANT_EVENTS
    for stream in sorted(entered, key=lambda stream: (stream.channel, entered[stream], stream)):
        count = max(len(found.get(stream, none)) for found in posts.values())
        messages[stream] = range(first, first + count)
        for post, wait, rank in (
            (Op.POST_SEND, Op.WAIT_SEND, stream.source),
            (Op.POST_RECV, Op.WAIT_RECV, stream.target),
        ):
            posted, awaited = posts[post].get(stream, none), waits[wait].get(stream, none)
            event[rank][posted] = first + np.arange(len(posted))
            event[rank][awaited] = event[rank][_posts_of(program.rows[rank], rank, posted, awaited)]
        first += count
    return messages


def _posts_of(rows: Rows, rank: int, posted: Ints, awaited: Ints) -> Ints:
    """Return for each wait of a stream the post of the same microbatch."""
    microbatch = rows[posted, 2]
    order = np.argsort(microbatch, kind="stable")
    at = np.searchsorted(microbatch[order], rows[awaited, 2])
    missing = at == len(posted)
    missing[~missing] = microbatch[order[at[~missing]]] != rows[awaited[~missing], 2]
    if missing.any():
        row = int(awaited[missing][0])
        raise PdmpiError(f"rank {rank}, row {row}: {Instruction.from_row(rows[row])} has no post")
    found: Ints = posted[order[at]]
    return found


def _number_reductions(rows: tuple[Rows, ...], group: int, first: int, event: list[Ints]) -> int:
    """Write into ``event`` the number of each row of one group; return how many reductions there are."""
    most = 0
    for mine, numbers in zip(rows, event, strict=True):
        for op in (Op.POST_REDUCE, Op.WAIT_REDUCE):
            at = np.flatnonzero((mine[:, 0] == op) & (mine[:, 3] == group))
            numbers[at] = first + 2 * np.arange(len(at))
            most = max(most, len(at))
    return most


def _mentions(rows: Rows, event: Ints, overlaps: NDArray[np.bool_]) -> Mentions:
    op = rows[:, 0]
    post_row = np.flatnonzero((op == Op.POST_SEND) | (op == Op.POST_RECV))
    wait_row = np.flatnonzero((op == Op.WAIT_SEND) | (op == Op.WAIT_RECV) | (op == Op.WAIT_REDUCE))
    reduces = np.flatnonzero(op == Op.POST_REDUCE)
    post_event, wait_event = event[post_row], event[wait_row]
    leads = np.zeros(len(post_row), bool)
    if len(reduces):
        backward = np.where(overlaps[rows[reduces, 3]], _overlapped(rows, reduces), reduces)
        again = np.flatnonzero(op[wait_row] == Op.WAIT_REDUCE)
        wait_event = np.insert(wait_event, again + 1, wait_event[again] + 1)
        wait_row = np.insert(wait_row, again + 1, wait_row[again])
        post_row = np.concatenate([post_row, backward, backward])
        post_event = np.concatenate([post_event, event[reduces], event[reduces] + 1])
        leads = np.concatenate([leads, np.ones(len(reduces), bool), np.zeros(len(reduces), bool)])
        order = np.argsort(post_row, kind="stable")
        post_row, post_event, leads = post_row[order], post_event[order], leads[order]
    return Mentions(post_row, post_event, leads, wait_row, wait_event)


def _overlapped(rows: Rows, reduces: Ints) -> Ints:
    """Return the backward that each reduction overlaps: the next of its stage; else the post itself."""
    found: Ints = reduces.copy()
    runs = np.flatnonzero((rows[:, 0] == Op.BACKWARD) | (rows[:, 0] == Op.BACKWARD_WEIGHT))
    for stage in np.unique(rows[reduces, 1]):
        own = runs[rows[runs, 1] == stage]
        mine = np.flatnonzero(rows[reduces, 1] == stage)
        after = np.searchsorted(own, reduces[mine])
        exists = after < len(own)
        found[mine[exists]] = own[after[exists]]
    return found
