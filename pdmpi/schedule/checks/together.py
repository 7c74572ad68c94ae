"""Replicas that normalise together run each forward and each backward of a stage at the same time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pdmpi.schedule.program import Op, Program
from pdmpi.schedule.violation import Fault, Violation

__all__ = ["check_meetings"]

_COMPUTED = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


def check_meetings(program: Program) -> Iterator[Violation]:
    """Yield computations that the other replicas do not run then, so that their sums would never end."""
    for index, group in enumerate(program.groups):
        if not group.statistics:
            continue
        first: NDArray[np.int64] | None = None
        for rank in group.ranks:
            rows = program.rows[rank]
            computed = np.flatnonzero(np.isin(rows[:, 0], _COMPUTED) & (rows[:, 1] == group.stage))
            yield from _alone(program, rank, index, computed)
            turns = np.stack([rows[computed, 0], rows[computed, 2] // len(group.ranks)])
            first = turns if first is None else first
            both = min(first.shape[1], turns.shape[1])
            differs = np.flatnonzero((first[:, :both] != turns[:, :both]).any(axis=0))
            if len(differs):
                text = f"replicas of stage {group.stage} normalise together, but rank {group.ranks[0]} runs "
                op, turn = first[:, differs[0]].tolist()
                text += f"{Op(op).name} of turn {turn} here"
                yield Violation(Fault.ORDER, rank, int(computed[differs[0]]), text)


def _alone(program: Program, rank: int, group: int, computed: NDArray[np.int64]) -> Iterator[Violation]:
    """Yield computations without a post and a wait of their turn right before them, and the reverse."""
    rows, replicas = program.rows[rank], len(program.groups[group].ranks)
    split = np.isin(rows[computed, 0], (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))
    last = rows[computed, 2] - rows[computed, 2] % replicas + replicas - 1
    met = np.ones(len(computed), bool)
    expected = np.zeros(len(rows), bool)
    for op, before in ((Op.POST_REDUCE, 2), (Op.WAIT_REDUCE, 1)):
        at = np.maximum(computed - before, 0)
        met &= (rows[at, 0] == op) & (rows[at, 3] == group) & (rows[at, 2] == last)
        expected[at] = True
    for i in np.flatnonzero(split | ~met).tolist():
        text = (
            "a backward in two parts sums statistics twice"
            if split[i]
            else f"the replicas of stage {program.groups[group].stage} do not wait for each other before it"
        )
        yield Violation(Fault.UPDATE, rank, int(computed[i]), text)
    meetings = np.isin(rows[:, 0], (Op.POST_REDUCE, Op.WAIT_REDUCE)) & (rows[:, 3] == group)
    for row in np.flatnonzero(meetings & ~expected).tolist():
        text = "a wait for the other replicas before nothing that they run together"
        yield Violation(Fault.UPDATE, rank, row, text)
