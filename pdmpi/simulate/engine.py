"""The simulator: when every instruction of a program starts and ends.

Discrete-event simulation, many ranks at a time: in every step all ranks whose wait is over
run to their next wait.  Messages that share a link with others wait until nothing that
is still to come can be ahead of them, then take it in the order in which they became ready.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdmpi.errors import PdmpiError
from pdmpi.schedule.program import Instruction, Program
from pdmpi.simulate.costs import Costs
from pdmpi.simulate.events import EventGraph, event_graph
from pdmpi.simulate.lookahead import Lookahead
from pdmpi.simulate.matching import ALWAYS, NUM_CONSTANT_EVENTS, Ints
from pdmpi.simulate.timeline import Timeline, Transfers

__all__ = ["simulate"]

_UNKNOWN = -1
_RANKS_NAMED = 4


def simulate(program: Program, costs: Costs) -> Timeline:
    """Predict when every instruction of a program starts and ends.

    An instruction that computes takes its stage's time on its device.  A message starts as
    soon as both its send and its receive are posted (rendezvous) and its links are free,
    and takes latency + bytes / bandwidth; messages on one link go one after the other in
    the order in which they became ready.  A reduction starts when all ranks of its group
    have its first bucket, goes on while their backwards run, and ends no sooner than its last
    bucket, which appears at their end; it does not compete with messages for links.

    Parameters
    ----------
    program
        Instructions of all ranks.
    costs
        What they cost.

    Returns
    -------
    Timeline
        Start and end of every row, and every transfer.

    Raises
    ------
    PdmpiError
        When the program deadlocks under rendezvous; the message names every blocked rank.
    """
    graph = event_graph(program, costs)
    run = _Run(graph)
    run.finish()
    if run.blocked.size:
        raise PdmpiError(_deadlock(program, graph, run))
    return _timeline(program, graph, run)


class _Run:
    """State of a simulation.

    Attributes
    ----------
    begin
        When each segment begins, in ticks.
    ready, done
        When each event's posts were all made, and when it happened (`_UNKNOWN` before).
    """

    def __init__(self, graph: EventGraph) -> None:
        self._graph = graph
        self.begin = np.zeros(len(graph.waits_for), np.int64)
        self.ready = np.zeros(len(graph.duration), np.int64)
        self.done = np.full(len(graph.duration), _UNKNOWN, np.int64)
        self.done[ALWAYS] = 0
        self._missing = graph.num_posts.copy()
        self._segment = graph.first_segment[:-1].copy()
        self._clock = np.zeros(len(self._segment), np.int64)
        self._free = np.zeros(graph.num_links + 1, np.int64)
        self._owner = np.zeros(graph.num_links + 1, np.int64)
        self._pending = np.zeros(0, np.int64)
        self._lookahead = Lookahead(graph)

    @property
    def blocked(self) -> Ints:
        """Ranks that have not reached their end."""
        return np.flatnonzero(self._segment != self._graph.first_segment[1:] - 1)

    def segment_of(self, rank: int) -> int:
        """Return the segment that a rank would run next."""
        return int(self._segment[rank])

    def finish(self) -> None:
        """Run until nothing more can happen."""
        while True:
            happened = self.done[self._graph.waits_for[self._segment]]
            able = np.flatnonzero(happened >= 0)
            if able.size:
                self._advance(able, happened[able])
            elif self._pending.size:
                self._release()
            else:
                return

    def _advance(self, ranks: Ints, happened: Ints) -> None:
        """Run these ranks to their next wait and make the posts on the way."""
        graph = self._graph
        segments = self._segment[ranks]
        begin = np.maximum(self._clock[ranks], happened)
        self.begin[segments] = begin
        self._clock[ranks] = begin + graph.length[segments]
        self._segment[ranks] = segments + 1
        first = graph.first_post[segments]
        counts = graph.first_post[segments + 1] - first
        ends = np.cumsum(counts)
        if not ends[-1]:
            return
        posts = np.repeat(first - ends + counts, counts) + np.arange(ends[-1])
        events = graph.post_event[posts]
        np.maximum.at(self.ready, events, np.repeat(begin, counts) + graph.post_offset[posts])
        np.subtract.at(self._missing, events, 1)
        ready = np.unique(events[self._missing[events] == 0])
        if ready.size:
            contended = graph.contended[ready]
            self._take_links(ready[~contended])
            self._pending = np.concatenate([self._pending, ready[contended]])

    def _release(self) -> None:
        """Let those pending messages happen that nothing still to come can be ahead of."""
        ready = self.ready[self._pending]
        order = np.lexsort((self._pending, ready))
        waiting, ready = self._pending[order], ready[order]
        free = self._free[self._graph.links[waiting]].max(axis=1)
        end = np.maximum(ready, free) + self._graph.duration[waiting]
        able = self._lookahead.unopposed(waiting, ready, end, self._segment)
        self._pending = waiting[~able]
        self._take_links(waiting[able])

    def _take_links(self, events: Ints) -> None:
        """Let messages happen, in this order on every link that several of them need."""
        graph = self._graph
        while events.size:
            links = graph.links[events]
            turn = self._first_in_line(links)
            now, used = events[turn], links[turn]
            start = np.maximum(self.ready[now], self._free[used].max(axis=1))
            self.done[now] = start + graph.duration[now]
            self._free[used] = self.done[now, None]
            self._free[-1] = 0
            events = events[~turn]

    def _first_in_line(self, links: Ints) -> NDArray[np.bool_]:
        """Return which of these messages has nobody before it on either of its links."""
        place = np.arange(len(links))
        # Of several writes to one element the last one stays: here that of the first message.
        self._owner[links[::-1, 0]] = place[::-1]
        first_out = self._owner[links[:, 0]] == place
        self._owner[links[::-1, 1]] = place[::-1]
        first_in = self._owner[links[:, 1]] == place
        first: NDArray[np.bool_] = (first_out & first_in) | (links[:, 0] == self._graph.num_links)
        return first


def _timeline(program: Program, graph: EventGraph, run: _Run) -> Timeline:
    """Turn ticks into the seconds of every row and transfer."""
    starts, ends = [], []
    for rank in range(len(program.rows)):
        segments = run.begin[graph.first_segment[rank] + graph.row_segment[rank]]
        times = np.zeros(len(segments) + 1)
        np.multiply(segments + graph.row_end[rank], graph.tick_s, out=times[1:])
        starts.append(times[:-1])
        ends.append(times[1:])
    streams = list(graph.messages)
    counts = [len(numbers) for numbers in graph.messages.values()]
    events = np.arange(sum(counts)) + NUM_CONSTANT_EVENTS
    end = run.done[events]
    transfers = Transfers(
        channel=np.repeat(np.array([s.channel for s in streams], np.int64), counts),
        source=np.repeat(np.array([s.source for s in streams], np.int64), counts),
        target=np.repeat(np.array([s.target for s in streams], np.int64), counts),
        microbatch=graph.microbatch[events],
        start_s=(end - graph.duration[events]).astype(np.float64) * graph.tick_s,
        end_s=end.astype(np.float64) * graph.tick_s,
    )
    return Timeline(program, tuple(starts), tuple(ends), transfers)


def _deadlock(program: Program, graph: EventGraph, run: _Run) -> str:
    """Return a message that names the first blocked ranks and what each waits for."""
    lines = []
    for rank in run.blocked[:_RANKS_NAMED].tolist():
        segment = run.segment_of(rank) - int(graph.first_segment[rank])
        row = int(np.searchsorted(graph.row_segment[rank], segment))
        lines.append(f"rank {rank} at row {row}: {Instruction.from_row(program.rows[rank][row])}")
    more = f"; and {run.blocked.size - _RANKS_NAMED} more" if run.blocked.size > _RANKS_NAMED else ""
    return f"the {program.schedule} program deadlocks under rendezvous: {'; '.join(lines)}{more}"
