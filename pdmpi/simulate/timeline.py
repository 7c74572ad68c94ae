"""A timeline: when every instruction of a program started and ended, predicted or measured."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pdmpi.schedule.program import Program

__all__ = ["Floats", "Timeline", "Transfers"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Messages between ranks, as arrays of equal length.

    Attributes
    ----------
    channel
        Index into the program's channels.
    source, target
        Ranks.
    microbatch
        The microbatch it belongs to.
    start_s, end_s
        From when to when it occupied its links.
    """

    channel: NDArray[np.int64]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    start_s: Floats
    end_s: Floats

    @classmethod
    def none(cls) -> Transfers:
        """Return no transfers: what is known of a measured run."""
        no, never = np.zeros(0, np.int64), np.zeros(0)
        return cls(channel=no, source=no, target=no, microbatch=no, start_s=never, end_s=never)

    def __len__(self) -> int:
        return len(self.channel)


@dataclass(frozen=True)
class Timeline:
    """Start and end of every instruction.

    Attributes
    ----------
    program
        The program that ran.
    start_s, end_s
        For each rank, seconds aligned with ``program.rows``.  A wait lasts from when the rank
        came to it until it was over.
    transfers
        Messages, where they are known.
    """

    program: Program
    start_s: tuple[Floats, ...]
    end_s: tuple[Floats, ...]
    transfers: Transfers = field(default_factory=Transfers.none)

    @property
    def duration_s(self) -> float:
        """Seconds until the last rank is done."""
        return max((float(end[-1]) for end in self.end_s if len(end)), default=0.0)
