"""Links between ranks: how long a message takes and which links it occupies."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pdmpi.plan.cluster import Cluster

__all__ = ["Link", "Network", "Route"]


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


@dataclass(frozen=True, slots=True)
class Route:
    """What a message meets on its way.

    Attributes
    ----------
    latency_s
        Seconds until the first byte arrives.
    bandwidth_bytes_per_s
        Rate of the bytes after it.
    links
        Links that are busy meanwhile: the sender's and the receiver's; none inside a device.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    links: tuple[Link, ...] = ()

    def seconds(self, nbytes: float) -> float:
        """Return the duration of one message; an empty one costs nothing."""
        return self.latency_s + nbytes / self.bandwidth_bytes_per_s if nbytes else 0.0


@dataclass(frozen=True)
class Network:
    """A cluster as ranks see it.

    A message crosses the outermost level that separates the two devices and is priced by that
    level alone, which is the slowest on its way.  Every device has one link each way to
    every level, for all its peers; on a shared level one each way serves all devices of a
    member (a node's network card).

    Parameters
    ----------
    cluster
        Levels of links.
    devices
        The cluster's device of each rank.
    """

    cluster: Cluster
    devices: tuple[int, ...]

    def route(self, source: int, target: int) -> Route:
        """Return how rank ``source`` reaches rank ``target``."""
        a, b = self.devices[source], self.devices[target]
        if a == b:
            return Route(0.0, float("inf"))
        index = self.cluster.level_between(a, b)
        level = self.cluster.levels[index]
        members = self._inner_size(index) if level.shared else 1
        links = (Link(index, a // members, True), Link(index, b // members, False))
        return Route(level.latency_s, level.bandwidth_bytes_per_s, links)

    def allreduce_s(self, ranks: Sequence[int], nbytes: float) -> float:
        """Return the seconds of a ring allreduce.

        Each of m ranks sends 2 (m - 1) / m of the bytes in 2 (m - 1) steps, as fast as
        the slowest hop of the ring (Patarasuk and Yuan, 2009).
        """
        m = len(ranks)
        if m == 1 or not nbytes:
            return 0.0
        hops = [self.route(a, b) for a, b in itertools.pairwise((*ranks, ranks[0]))]
        steps = 2 * (m - 1)
        bandwidth = min(hop.bandwidth_bytes_per_s for hop in hops)
        return steps * (nbytes / m / bandwidth + max(hop.latency_s for hop in hops))

    def _inner_size(self, level: int) -> int:
        """Return the devices of one member of the level inside ``level``."""
        size = 1
        for inner in self.cluster.levels[:level]:
            size *= inner.count
        return size
