"""One thing that is wrong with a program, and where."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Fault", "Violation"]


class Fault(str, Enum):
    """Kinds of violations."""

    SHAPE = "shape"
    """Rows, stages, ranks, channels or slot numbers outside what the program declares."""
    COUNT = "count"
    """Microbatches do not fill updates or rounds over replicas."""
    COVERAGE = "coverage"
    """A microbatch lacks, or has twice, a forward or a backward; or it runs on another replica."""
    SEQUENCE = "sequence"
    """A computation before what it needs, or a wait without its post."""
    ORDER = "order"
    """Sends and receives of a channel in different order."""
    DEADLOCK = "deadlock"
    """Ranks that wait for each other."""
    VERSION = "version"
    """Weights that are not there, or another version backward than forward."""
    SLOT = "slot"
    """A slot overwritten while it is needed, or more slots than declared."""
    UPDATE = "update"
    """An update that misses gradients, or a reduction that does not fit it."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One violation.

    Attributes
    ----------
    fault
        Kind.
    rank, row
        Place in the program: rank, and index of the instruction; -1 where there is none.
    message
        One line for people.
    """

    fault: Fault
    rank: int
    row: int
    message: str

    def __str__(self) -> str:
        place = f"rank {self.rank}, instruction {self.row}: " if self.row >= 0 else ""
        if self.row < 0 <= self.rank:
            place = f"rank {self.rank}: "
        return f"{self.fault.value}: {place}{self.message}"
