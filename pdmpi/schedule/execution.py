"""Abstract execution of a program: all ranks at once, computations of unit cost, free transfers.

It shows whether every rank comes to its end, and when each computation would start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from pdmpi.schedule.matching import NOBODY, Matching, match
from pdmpi.schedule.program import Op, Program

__all__ = ["UNIT_COSTS", "Execution", "execute"]

UNIT_COSTS: Mapping[Op, int] = MappingProxyType(
    {Op.FORWARD: 1, Op.RECOMPUTE: 1, Op.BACKWARD: 2, Op.BACKWARD_INPUT: 1, Op.BACKWARD_WEIGHT: 1}
)
"""Ticks of each computation, as the papers draw them; everything else takes none."""


@dataclass(frozen=True)
class Execution:
    """How far each rank came.

    Attributes
    ----------
    program, matching
        What was executed, and which wait is for which post.
    done
        Waits that each rank completed.
    start
        For each rank, the tick at which each row starts; -1 for rows that are never reached.
    """

    program: Program
    matching: Matching
    done: tuple[int, ...]
    start: tuple[NDArray[np.int64], ...]

    @property
    def blocked(self) -> dict[int, int]:
        """The row that each stuck rank waits in, by rank."""
        waits = self.matching.waits
        return {r: int(waits[r][n]) for r, n in enumerate(self.done) if n < len(waits[r])}


def execute(program: Program, *, rendezvous: bool = True) -> Execution:
    """Run all ranks until they end or wait for each other.

    Parameters
    ----------
    program
        The program.
    rendezvous
        Whether a send completes only when its receive is posted, as large messages do;
        otherwise it completes at once, as small ones do.

    Notes
    -----
    A reduction completes when every member of the group waits for it: the latest that any
    implementation may do so.
    """
    matching = match(program)
    costs = np.zeros(len(Op), np.int64)
    costs[list(UNIT_COSTS)] = list(UNIT_COSTS.values())
    before = [np.concatenate([[0], np.cumsum(costs[rows[:, 0]])]) for rows in program.rows]
    machine = _Machine(program, matching, before, rendezvous)
    machine.run()
    start = []
    for rank, rows in enumerate(program.rows):
        segment = np.searchsorted(matching.waits[rank], np.arange(len(rows)))
        reached = segment <= machine.done[rank]
        offset = np.array(machine.offset[rank])[np.where(reached, segment, 0)]
        start.append(np.where(reached, before[rank][:-1] + offset, -1))
    return Execution(program, matching, tuple(machine.done), tuple(start))


class _Machine:
    """Ranks that advance from wait to wait.

    Rows between two waits are a segment; ``offset[rank][i]`` is how much later than without
    any waiting the rows of segment ``i`` run.
    """

    def __init__(
        self, program: Program, matching: Matching, before: list[NDArray[np.int64]], rendezvous: bool
    ) -> None:
        num_ranks = len(program.rows)
        self.done = [0] * num_ranks
        self.offset: list[list[int]] = [[0] for _ in range(num_ranks)]
        self._members = [group.ranks for group in program.groups]
        self._reduced: list[dict[int, list[int]]] = [{} for _ in program.groups]
        self._peer: list[list[int]] = []
        self._segment: list[list[int]] = []
        self._ready: list[list[int]] = []
        self._own: list[list[int]] = []
        for rank, waits in enumerate(matching.waits):
            peer, need = matching.peer[rank].copy(), matching.need[rank]
            if not rendezvous:
                peer[program.rows[rank][waits, 0] == Op.WAIT_SEND] = NOBODY
            segment, ready = need.copy(), np.zeros(len(need), np.int64)
            for other in np.unique(peer[peer >= 0]).tolist():
                at = peer == other
                segment[at] = np.searchsorted(matching.waits[other], need[at])
                segment[at & (need >= len(program.rows[other]))] = len(matching.waits[other]) + 1
                ready[at] = before[other][np.minimum(need[at], len(before[other]) - 1)]
            for group in range(len(program.groups)):
                self._reduced[group][rank] = np.flatnonzero(peer == -1 - group).tolist()
            self._peer.append(peer.tolist())
            self._segment.append(segment.tolist())
            self._ready.append(ready.tolist())
            self._own.append(before[rank][waits].tolist())

    def run(self) -> None:
        """Advance until nobody can."""
        waiting: list[list[int]] = [[] for _ in self.done]
        queue = deque(range(len(self.done)))
        while queue:
            rank = queue.popleft()
            came_from = self.done[rank]
            for_whom = self._advance(rank)
            if for_whom is not None:
                waiting[for_whom].append(rank)
            if self.done[rank] > came_from:
                queue.extend(waiting[rank])
                waiting[rank].clear()

    def _advance(self, rank: int) -> int | None:
        """Run one rank; return the rank that it has to wait for, if any."""
        done, offsets = self.done, self.offset
        peers, segments, ready, own = (
            self._peer[rank], self._segment[rank], self._ready[rank], self._own[rank],
        )  # fmt: skip
        offset = offsets[rank]
        late = offset[-1]
        for i in range(done[rank], len(peers)):
            peer = peers[i]
            if peer >= 0:
                segment = segments[i]
                if done[peer] < segment:
                    return peer
                time = ready[i] + offsets[peer][segment]
            elif peer == NOBODY:
                time = 0
            else:
                missing, time = self._reduction(-1 - peer, segments[i])
                if missing is not None:
                    return missing
            late = max(late, time - own[i])
            offset.append(late)
            done[rank] = i + 1
        return None

    def _reduction(self, group: int, number: int) -> tuple[int | None, int]:
        """Return a member that has not come to a reduction yet, or when the last one came."""
        time = 0
        for member in self._members[group]:
            waits = self._reduced[group].get(member, [])
            if number >= len(waits) or self.done[member] < waits[number]:
                return member, 0
            time = max(time, self._own[member][waits[number]] + self.offset[member][waits[number]])
        return None, time
