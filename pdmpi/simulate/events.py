"""Lowering of a program for simulation: segments, the events they wait for, the posts that cause events.

A *segment* is a wait and everything that its rank does until the next one, so nothing in
it can be delayed but its begin.  An *event* is a message or a part of a reduction: it is
ready when all its *posts* are made, then takes its links for its duration.  Times are
integers of one tick, a power of two of a second, so that sums are exact, ties are ties,
and nothing depends on the order in which the simulator works.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdmpi.schedule.matching import Stream
from pdmpi.schedule.program import Op, Program, Rows
from pdmpi.simulate.costs import Costs
from pdmpi.simulate.matching import ALWAYS, NEVER, Events, Ints, Mentions, match
from pdmpi.simulate.network import Link

__all__ = ["EventGraph", "event_graph"]

_TICK_BITS = 62
"""Times of a whole program fit into this many bits."""


@dataclass(frozen=True)
class EventGraph:
    """A program with its costs, as flat arrays.

    Attributes
    ----------
    tick_s
        Seconds of one tick.
    first_segment
        First segment of each rank, and their total; shape (ranks + 1,).  The last segment
        of a rank is empty and waits for `NEVER`.
    waits_for, length
        The event that lets each segment begin, and its duration; shape (segments,).
    first_post
        Position of each segment's first post, and their total; shape (segments + 1,).
    post_event, post_offset
        The event of each post, and when in its segment it is made; shape (posts,).
    num_posts, duration, microbatch
        How many posts make an event ready, how long it then takes, and which microbatch a
        message belongs to; shape (events,).
    links
        The two links that an event occupies, or ``num_links`` for none; shape (events, 2).
    contended
        Whether an event shares a link with events of another stream, so that they take
        it in the order of time.
    num_links
        Number of links.
    row_segment, row_end
        For each rank, the segment of each row and when in it the row ends.
    messages
        The events of each stream of messages.
    """

    tick_s: float
    first_segment: Ints
    waits_for: Ints
    length: Ints
    first_post: Ints
    post_event: Ints
    post_offset: Ints
    num_posts: Ints
    duration: Ints
    microbatch: Ints
    links: Ints
    contended: NDArray[np.bool_]
    num_links: int
    row_segment: tuple[Ints, ...]
    row_end: tuple[Ints, ...]
    messages: Mapping[Stream, range]


def event_graph(program: Program, costs: Costs) -> EventGraph:
    """Lower a program with its costs for simulation.

    Raises
    ------
    PdmpiError
        When a wait has no post before it.
    """
    matched = match(program)
    mentions = matched.mentions
    events = _Prices(program, costs, matched)
    table = _Durations(program, costs, float(events.seconds.max()) * len(events.seconds))
    ranks = [_Rank(rows, table, rank, mentions[rank]) for rank, rows in enumerate(program.rows)]
    sizes = [len(rank.waits_for) for rank in ranks]
    counts = np.concatenate([rank.post_count for rank in ranks])
    post_event = np.concatenate([m.post_event for m in mentions])
    microbatch = np.zeros(len(events.seconds), np.int64)
    microbatch[post_event] = np.concatenate(
        [rows[m.post_row, 2] for rows, m in zip(program.rows, mentions, strict=True)]
    )
    return EventGraph(
        tick_s=table.tick_s,
        first_segment=np.concatenate([[0], np.cumsum(sizes)]),
        waits_for=np.concatenate([rank.waits_for for rank in ranks]),
        length=np.concatenate([rank.length for rank in ranks]),
        first_post=np.concatenate([[0], np.cumsum(counts)]),
        post_event=post_event,
        post_offset=np.concatenate([rank.post_offset for rank in ranks]),
        num_posts=events.num_posts,
        duration=table.ticks(events.seconds),
        microbatch=microbatch,
        links=events.links,
        contended=events.contended,
        num_links=events.num_links,
        row_segment=tuple(rank.row_segment for rank in ranks),
        row_end=tuple(rank.row_end for rank in ranks),
        messages=matched.messages,
    )


class _Prices:
    """Duration, links and number of posts of every event."""

    def __init__(self, program: Program, costs: Costs, events: Events) -> None:
        self.seconds = np.zeros(events.count)
        self.num_posts = np.full(events.count, 2, np.int64)
        self.contended = np.zeros(events.count, bool)
        links: dict[Stream, tuple[Link, ...]] = {}
        for stream, numbers in events.messages.items():
            nbytes = costs.message_bytes.get(program.channels[stream.channel], 0)
            seconds = costs.network.message_s(stream.source, stream.target, nbytes)
            self.seconds[numbers.start : numbers.stop] = seconds
            links[stream] = costs.network.links(stream.source, stream.target) if seconds else ()
        users = Counter(itertools.chain.from_iterable(links.values()))
        index = {link: i for i, link in enumerate(users)}
        self.num_links = len(index)
        self.links = np.full((events.count, 2), self.num_links, np.int64)
        for stream, taken in links.items():
            if taken:
                numbers = events.messages[stream]
                self.links[numbers.start : numbers.stop] = [index[link] for link in taken]
                self.contended[numbers.start : numbers.stop] = any(users[link] > 1 for link in taken)
        for group, numbers in zip(program.groups, events.reductions, strict=True):
            nbytes, buckets = costs.summed(group)
            whole = costs.network.allreduce_s(group.ranks, nbytes)
            self.num_posts[numbers.start : numbers.stop] = len(group.ranks)
            self.seconds[numbers.start : numbers.stop : 2] = whole
            self.seconds[numbers.start + 1 : numbers.stop : 2] = whole / buckets


class _Durations:
    """Ticks of every operation of every stage, for devices of each speed."""

    def __init__(self, program: Program, costs: Costs, events_s: float) -> None:
        self._costs = costs
        self._buckets = np.array([costs.buckets(stage) for stage in range(len(costs.stages))])
        self._by_speed: dict[float, Ints] = {}
        slowest = max(stage.seconds(op) for stage in costs.stages for op in Op) / min(costs.speeds)
        longest = slowest * (1 + sum(map(len, program.rows))) + events_s
        self.tick_s = math.ldexp(1.0, math.frexp(longest)[1] - _TICK_BITS)

    def ticks(self, seconds: NDArray[np.float64]) -> Ints:
        """Return durations in ticks."""
        return np.rint(seconds / self.tick_s).astype(np.int64)

    def buckets(self, stages: Ints) -> Ints:
        """Return in how many buckets the gradients of each of these stages are summed."""
        return self._buckets[stages]

    def of(self, rows: Rows, rank: int) -> Ints:
        """Return the ticks of the rows of a rank."""
        speed = self._costs.speeds[rank]
        if speed not in self._by_speed:
            seconds = np.array([[stage.seconds(op) for stage in self._costs.stages] for op in Op])
            self._by_speed[speed] = self.ticks(seconds / speed)
        return self._by_speed[speed][rows[:, 0], rows[:, 1]]


class _Rank:
    """Segments of one rank."""

    def __init__(self, rows: Rows, durations: _Durations, rank: int, mentions: Mentions) -> None:
        ticks = durations.of(rows, rank)
        end = np.cumsum(ticks)
        begin = np.concatenate([[0], end[mentions.wait_row]])
        total = end[-1] if len(end) else 0
        starts = np.bincount(mentions.wait_row, minlength=len(rows)) if len(rows) else np.zeros(0, np.int64)
        self.row_segment = np.cumsum(starts)
        self.row_end = end - begin[self.row_segment]
        self.waits_for = np.concatenate([[ALWAYS], mentions.wait_event, [NEVER]])
        self.length = np.concatenate([np.diff(np.concatenate([begin, [total]])), [0]])
        post_segment = self.row_segment[mentions.post_row]
        self.post_count = np.bincount(post_segment, minlength=len(self.waits_for))
        self.post_offset = self.row_end[mentions.post_row]
        if mentions.post_leads.any():
            leads = mentions.post_row[mentions.post_leads]
            first_bucket = ticks[leads] // durations.buckets(rows[leads, 1])
            self.post_offset[mentions.post_leads] -= ticks[leads] - first_bucket
