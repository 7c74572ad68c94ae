"""One replica of one stage as the checks see it: where its instructions are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pdmpi.schedule.program import NUM_COLUMNS, OPERANDS, Channel, Op, Program, Rows

__all__ = ["MISSING", "Located", "Part", "parts"]

Indices = NDArray[np.int64]

MISSING = -1
"""The row of an instruction that is not there."""


@dataclass(frozen=True, slots=True)
class Located:
    """Instructions of one sort, one for each microbatch of a replica.

    Attributes
    ----------
    row
        Index in the rank's program; `MISSING`.
    table
        Their rows, shape (microbatches, columns); meaningless where missing.
    op
        Names the operands.
    """

    row: Indices
    table: Rows
    op: Op

    @property
    def there(self) -> NDArray[np.bool_]:
        """Whether each is in the program."""
        return self.row >= 0

    def __getitem__(self, operand: str) -> Indices:
        return self.table[:, 3 + OPERANDS[self.op].index(operand)].astype(np.int64)


class Part:
    """The instructions of one replica of one stage.

    Attributes
    ----------
    rank, stage, replica
        Which.
    microbatches
        Those that belong to the replica.
    trained
        Whether the stage has updates.
    split
        Whether its backward is in two parts.
    channels
        Those that start or end at the stage, with their numbers.
    """

    def __init__(
        self, program: Program, stage: int, replica: int, channels: tuple[tuple[int, Channel], ...]
    ) -> None:
        self.channels = channels
        self.program = program
        self.stage = stage
        self.replica = replica
        self.rank = program.topology.ranks[stage][replica]
        self.num_replicas = len(program.topology.ranks[stage])
        self.microbatches = np.arange(replica, program.num_microbatches, self.num_replicas)
        self.trained = program.microbatches_per_update[stage] > 0
        self.rows = program.rows[self.rank]
        at = np.flatnonzero(self.rows[:, 1] == stage)
        ops = self.rows[at, 0]
        self._at: dict[Op, Indices] = {op: at[ops == op] for op in Op}
        self.split = len(self._at[Op.BACKWARD_INPUT]) + len(self._at[Op.BACKWARD_WEIGHT]) > 0

    def at(self, op: Op) -> Indices:
        """Return the rows of one operation, ascending."""
        return self._at[op]

    def on_channel(self, op: Op, channel: int) -> Indices:
        """Return the rows of one message operation on one channel."""
        at = self._at[op]
        found: Indices = at[self.rows[at, 3] == channel]
        return found

    def located(self, op: Op, at: Indices | None = None) -> Located:
        """Return the last of the rows ``at`` (all of the operation) for each microbatch of the replica."""
        rows = self._at[op] if at is None else at
        number = self.rows[rows, 2] // self.num_replicas
        mine = (self.rows[rows, 2] % self.num_replicas == self.replica) & (number < len(self.microbatches))
        found = np.full(len(self.microbatches), MISSING, np.int64)
        found[number[mine]] = rows[mine]
        table = self.rows[found] if len(self.rows) else np.full((len(found), NUM_COLUMNS), MISSING, np.int32)
        return Located(found, table, op)

    @cached_property
    def forward(self) -> Located:
        """The forwards."""
        return self.located(Op.FORWARD)

    @cached_property
    def backward(self) -> Located:
        """The computation that makes the gradients for earlier stages."""
        return self.located(Op.BACKWARD_INPUT if self.split else Op.BACKWARD)

    @cached_property
    def last_use(self) -> Located:
        """The last computation of each microbatch."""
        if not self.trained:
            return self.forward
        return self.located(Op.BACKWARD_WEIGHT) if self.split else self.backward


def parts(program: Program) -> Iterator[Part]:
    """Go through every replica of every stage."""
    channels: list[list[tuple[int, Channel]]] = [[] for _ in program.topology.ranks]
    for index, channel in enumerate(program.channels):
        channels[channel.source_stage].append((index, channel))
        channels[channel.target_stage].append((index, channel))
    for stage, ranks in enumerate(program.topology.ranks):
        for replica in range(len(ranks)):
            yield Part(program, stage, replica, tuple(channels[stage]))
