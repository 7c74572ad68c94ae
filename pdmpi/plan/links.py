"""What messages and allreduces cost on a cluster's levels of links."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pdmpi.plan.cluster import Cluster

__all__ = ["Links", "Port"]

_MAX_PAIRS = 1 << 16


@dataclass(frozen=True, slots=True)
class Port:
    """The links of a stage's replicas together, towards one level: seconds a byte and a message."""

    s_per_byte: float
    s_per_message: float

    def seconds(self, nbytes: float) -> float:
        """Return how long a microbatch's bytes occupy the stage's links; nothing is free."""
        return self.s_per_message + nbytes * self.s_per_byte if nbytes else 0.0


@dataclass(frozen=True)
class Links:
    """Prices of a cluster's links.

    A message between two devices crosses the outermost level that separates them and all
    levels inside it, and is as slow as the slowest of these.
    """

    cluster: Cluster

    @cached_property
    def member_sizes(self) -> tuple[int, ...]:
        """Devices of one member that each level joins: 1 for the innermost."""
        sizes = itertools.accumulate((level.count for level in self.cluster.levels), int.__mul__, initial=1)
        return tuple(sizes)[:-1]

    def level(self, a: int, b: int) -> int:
        """Return the outermost level that separates two devices; 0 for a device and itself."""
        return self.cluster.level_between(a, b)

    def port(self, devices: Sequence[int], level: int) -> Port:
        """Return the price of what all replicas of a stage send (or receive) up to a level."""
        ports = []
        for index, link in enumerate(self.cluster.levels[: level + 1]):
            size = self.member_sizes[index]
            count = len({d // size for d in devices}) if link.shared else len(devices)
            ports.append((1.0 / (count * link.bandwidth_bytes_per_s), link.latency_s / count))
        return Port(max(p[0] for p in ports), max(p[1] for p in ports))

    def message_s(self, level: int, nbytes: float) -> float:
        """Return the seconds of one message up to a level."""
        return self.port((0,), level).seconds(nbytes)

    def allreduce_s(self, devices: Sequence[int], nbytes: float) -> float:
        """Return the seconds of a ring allreduce over the slowest link that the devices span.

        Each of m devices sends 2 (m - 1) / m of the bytes in 2 (m - 1) steps (Patarasuk and
        Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009), at the
        part of a link's bandwidth that an allreduce reaches.
        """
        m = len(devices)
        if m == 1 or not nbytes:
            return 0.0
        port = self.ring(self.level(min(devices), max(devices)))
        return 2 * (m - 1) * (nbytes / m * port.s_per_byte + port.s_per_message)

    def ring(self, level: int) -> Port:
        """Return the price of what one member of a ring allreduce sends, for a ring up to a level."""
        links = self.cluster.levels[: level + 1]
        return Port(
            max(1.0 / (link.bandwidth_bytes_per_s * link.allreduce_efficiency) for link in links),
            max(link.latency_s for link in links),
        )

    def allreduce_work_s(self, devices: Sequence[int], nbytes: float) -> float:
        """Return the seconds that each device computes longer beside an allreduce."""
        m = len(devices)
        if m == 1:
            return 0.0
        return 2 * (m - 1) / m * nbytes * self.work_s_per_byte(self.level(min(devices), max(devices)))

    def work_s_per_byte(self, level: int) -> float:
        """Return what a device computes longer for each byte sent in a ring allreduce up to a level."""
        return max(link.allreduce_work_s_per_byte for link in self.cluster.levels[: level + 1])

    def ring_bytes(self, devices: Sequence[int], nbytes: float) -> list[float]:
        """Return the bytes that one allreduce moves over each level, inner to outer."""
        totals = [0.0] * len(self.cluster.levels)
        m = len(devices)
        if m > 1:
            ring = sorted(devices)
            for a, b in itertools.pairwise([*ring, ring[0]]):
                totals[self.level(a, b)] += 2 * (m - 1) / m * nbytes
        return totals

    def boundary_shares(self, sources: Sequence[int], targets: Sequence[int]) -> list[float]:
        """Return the share of microbatches that cross each level between two stages, served round-robin."""
        k = np.arange(min(math.lcm(len(sources), len(targets)), _MAX_PAIRS))
        a, b = np.array(sources)[k % len(sources)], np.array(targets)[k % len(targets)]
        shares, inside = [], np.zeros(len(k), dtype=bool)
        for size in (*self.member_sizes[1:], self.cluster.num_devices):
            now = (a // size == b // size) & ~inside
            shares.append(float(now.mean()))
            inside |= now
        return shares
