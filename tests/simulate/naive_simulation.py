"""The simulator's oracle: one rank, one row, one message at a time, in exact fractions."""

from __future__ import annotations

from fractions import Fraction

from pdmpi.schedule.program import Instruction, Op, Program
from pdmpi.simulate.costs import Costs

Stream = tuple[int, int, int]

_SENDS = (Op.POST_SEND, Op.WAIT_SEND)
_POSTS = (Op.POST_SEND, Op.POST_RECV)
_WAITS = (Op.WAIT_SEND, Op.WAIT_RECV)


class NaiveSimulation:
    """Runs a program with the semantics of `pdmpi.simulate.engine.simulate`, slowly."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program, self.costs = program, costs
        self.rows = [list(program.instructions(rank)) for rank in range(program.topology.num_ranks)]
        self.start: list[list[Fraction]] = [[] for _ in self.rows]
        self.end: list[list[Fraction]] = [[] for _ in self.rows]
        self.posts: dict[tuple[Stream, bool], list[tuple[int, Fraction]]] = {}
        self.entered: dict[Stream, int] = {}
        self.done: dict[tuple[Stream, int], Fraction] = {}
        self.free: dict[object, Fraction] = {}
        self.reduced: dict[tuple[int, int], dict[int, tuple[Fraction, Fraction]]] = {}
        self.armed: list[dict[int, list[int]]] = [{} for _ in self.rows]
        for rank, rows in enumerate(self.rows):
            for row in rows:
                if row.op in _POSTS:
                    self.entered.setdefault(self._stream(rank, row), row.microbatch)

    def run(self) -> NaiveSimulation:
        while True:
            moved = [self._advance(rank) for rank in range(len(self.rows))]
            if not any(moved) and not self._transfer():
                return self

    def _stream(self, rank: int, row: Instruction) -> Stream:
        sends = row.op in _SENDS
        return (row["channel"], rank, row["peer"]) if sends else (row["channel"], row["peer"], rank)

    def _advance(self, rank: int) -> bool:
        moved = False
        while len(self.end[rank]) < len(self.rows[rank]):
            row = self.rows[rank][len(self.end[rank])]
            now = self.end[rank][-1] if self.end[rank] else Fraction(0)
            end = self._finish(rank, row, now)
            if end is None:
                return moved
            self.start[rank].append(now)
            self.end[rank].append(end)
            moved = True
        return moved

    def _finish(self, rank: int, row: Instruction, now: Fraction) -> Fraction | None:
        """Return when a row ends, or None while it is blocked."""
        if row.op in _POSTS:
            key = (self._stream(rank, row), row.op in _SENDS)
            self.posts.setdefault(key, []).append((row.microbatch, now))
            return now
        if row.op in _WAITS:
            done = self.done.get((self._stream(rank, row), row.microbatch))
            return None if done is None else max(now, done)
        if row.op == Op.POST_REDUCE:
            number = sum(r.op == Op.POST_REDUCE and r["group"] == row["group"] for r in self._past(rank))
            if self.program.groups[row["group"]].statistics:
                self.reduced.setdefault((row["group"], number), {})[rank] = (now, now)
            else:
                self.armed[rank].setdefault(row.stage, []).append(row["group"] * 1000 + number)
            return now
        if row.op == Op.WAIT_REDUCE:
            number = sum(r.op == Op.WAIT_REDUCE and r["group"] == row["group"] for r in self._past(rank))
            return self._reduction(row["group"], number, now)
        seconds = Fraction(self.costs.stages[row.stage].seconds(row.op)) / Fraction(self.costs.speeds[rank])
        if row.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            buckets = self.costs.buckets(row.stage)
            for key in self.armed[rank].pop(row.stage, []):
                times = (now + seconds / buckets, now + seconds)
                self.reduced.setdefault(divmod(key, 1000), {})[rank] = times
        return now + seconds

    def _past(self, rank: int) -> list[Instruction]:
        return self.rows[rank][: len(self.end[rank])]

    def _reduction(self, group: int, number: int, now: Fraction) -> Fraction | None:
        ranks = self.program.groups[group].ranks
        times = self.reduced.get((group, number), {})
        if len(times) < len(ranks):
            return None
        stage = self.program.groups[group].stage
        if self.program.groups[group].statistics:
            alone = Fraction(self.costs.network.allreduce_s(ranks, 0))
            return max(now, max(t for t, _ in times.values()) + alone)
        whole = Fraction(self.costs.network.allreduce_s(ranks, self.costs.stages[stage].gradient_bytes))
        first = max(t for t, _ in times.values()) + whole
        last = max(t for _, t in times.values()) + whole / self.costs.buckets(stage)
        return max(now, first, last)

    def _transfer(self) -> bool:
        """Let the message that was ready first happen."""
        ready = []
        for stream, entered in self.entered.items():
            index = sum(1 for s, _ in self.done if s == stream)
            sends, receives = self.posts.get((stream, True), []), self.posts.get((stream, False), [])
            if index < min(len(sends), len(receives)):
                time = max(sends[index][1], receives[index][1])
                ready.append((time, (stream[0], entered, stream), sends[index][0], stream))
        if not ready:
            return False
        time, _, microbatch, stream = min(ready)
        nbytes = self.costs.message_bytes[self.program.channels[stream[0]]]
        seconds = Fraction(self.costs.network.message_s(stream[1], stream[2], nbytes))
        links = self.costs.network.links(stream[1], stream[2]) if seconds else ()
        end = max([time, *(self.free.get(link, Fraction(0)) for link in links)]) + seconds
        for link in links:
            self.free[link] = end
        self.done[stream, microbatch] = end
        return True
