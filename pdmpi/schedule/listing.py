"""A rank's instructions while they are gathered: each stands in a place beside a computation."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from pdmpi.schedule.program import NO_SLOT, NUM_COLUMNS, Op, Rows

__all__ = ["START", "Listing", "Place"]

START = -1
"""Position before every computation."""


class Place(IntEnum):
    """Where an instruction stands beside a computation, in this order."""

    SENT = 0
    RECOMPUTE = 1
    RECEIVED = 2
    POST_REDUCE = 3
    TOGETHER = 4
    COMPUTE = 5
    GRADIENT_SENT = 6
    SEND = 7
    RECEIVE = 8
    REDUCED = 9
    JOINED = 10
    UPDATE = 11


class Listing:
    """Instructions of one rank, gathered in any order and sorted once."""

    def __init__(self) -> None:
        self._keys: list[NDArray[np.int64]] = []
        self._blocks: list[Rows] = []

    def add(
        self,
        position: NDArray[np.int64],
        place: Place,
        op: Op | NDArray[np.int32],
        stage: int,
        microbatch: NDArray[np.int64],
        *operands: int | NDArray[np.int64],
    ) -> None:
        """Add one instruction for each position; scalars are repeated."""
        block = np.full((len(position), NUM_COLUMNS), NO_SLOT, np.int32)
        for column, values in enumerate((op, stage, microbatch, *operands)):
            block[:, column] = values
        self._blocks.append(block)
        self._keys.append(position * len(Place) + int(place))

    def rows(self) -> Rows:
        """Return the instructions in order; those added first come first within a place."""
        if not self._blocks:
            return np.empty((0, NUM_COLUMNS), np.int32)
        order = np.argsort(np.concatenate(self._keys), kind="stable")
        return np.concatenate(self._blocks)[order]
