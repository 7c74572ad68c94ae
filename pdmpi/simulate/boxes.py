"""The computations of one rank as boxes on its time axis: what drawings and traces show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pdmpi.schedule.program import Instruction, Op
from pdmpi.simulate.report import COMPUTE
from pdmpi.simulate.timeline import Timeline

__all__ = ["Box", "boxes"]


@dataclass(frozen=True, slots=True)
class Box:
    """One instruction that takes time, or an update.

    Attributes
    ----------
    op, stage, microbatch
        Of the instruction.
    version
        Weight version that it reads (that it makes, for an update); -1 for a reduction.
    start_s, end_s
        Seconds.
    """

    op: Op
    stage: int
    microbatch: int
    version: int
    start_s: float
    end_s: float


def boxes(timeline: Timeline, rank: int, begin_s: float, end_s: float) -> Iterator[Box]:
    """Return what a rank computes, or waits for a reduction, that overlaps a span of time."""
    rows, starts, ends = timeline.program.rows[rank], timeline.start_s[rank], timeline.end_s[rank]
    updates = rows[:, 0] == Op.UPDATE
    takes_time = np.isin(rows[:, 0], [*COMPUTE, Op.WAIT_REDUCE]) & (ends > starts) & (starts < end_s)
    shown = (takes_time | (updates & (starts <= end_s))) & (ends >= begin_s)
    for i in np.flatnonzero(shown).tolist():
        instruction = Instruction.from_row(rows[i])
        version = -1 if instruction.op == Op.WAIT_REDUCE else instruction["version"]
        yield Box(
            instruction.op, instruction.stage, instruction.microbatch, version,
            float(starts[i]), float(ends[i]),
        )  # fmt: skip
