"""The cluster as ranks see it: how long messages take and which links they occupy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pdmpi.plan.cluster import Cluster
from pdmpi.plan.links import Links

__all__ = ["Link", "Network"]


@dataclass(frozen=True, slots=True, order=True)
class Link:
    """One direction of one link: out of, or into, a member of a level.

    Attributes
    ----------
    level
        Index of the level that the link leads to.
    owner
        The device that has the link for itself, or, where the level is shared, the member
        (a node) whose devices share it.
    outward
        Whether it carries what the owner sends; what it receives has its own (full duplex).
    """

    level: int
    owner: int
    outward: bool


@dataclass(frozen=True)
class Network:
    """Links between ranks.

    A message occupies two links of the outermost level that it crosses: its sender's, outward,
    and its receiver's, inward.  A device has one link each way for all its peers; where the level
    is shared, all devices of a member (a node) have one between them.

    Attributes
    ----------
    cluster
        Levels of links.
    devices
        The cluster's device of each rank.
    """

    cluster: Cluster
    devices: tuple[int, ...]

    @cached_property
    def _prices(self) -> Links:
        return Links(self.cluster)

    def message_s(self, source: int, target: int, nbytes: float) -> float:
        """Return the seconds of a message between two ranks; free inside a device."""
        a, b = self.devices[source], self.devices[target]
        return 0.0 if a == b else self._prices.message_s(self._prices.level(a, b), nbytes)

    def links(self, source: int, target: int) -> tuple[Link, Link]:
        """Return the links that a message between two ranks occupies."""
        a, b = self.devices[source], self.devices[target]
        level = self._prices.level(a, b)
        size = self._prices.member_sizes[level] if self.cluster.levels[level].shared else 1
        return Link(level, a // size, True), Link(level, b // size, False)

    def allreduce_s(self, ranks: Sequence[int], nbytes: float) -> float:
        """Return the seconds of a ring allreduce over ranks."""
        return self._prices.allreduce_s([self.devices[rank] for rank in ranks], nbytes)

    def allreduce_work_s(self, ranks: Sequence[int], nbytes: float) -> float:
        """Return the seconds that each rank's device computes longer beside an allreduce over ranks."""
        return self._prices.allreduce_work_s([self.devices[rank] for rank in ranks], nbytes)
