"""The cluster: devices, and levels of links from the innermost to the outermost."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Cluster", "Device", "Level"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of links: ``count`` members of the level inside, joined at this rate.

    Attributes
    ----------
    name
        What joins the members: ``"nvlink"``, ``"ethernet"``.
    count
        Members of the level inside that one member of this level joins.
    bandwidth_bytes_per_s
        Of one link, each way at once (full duplex).
    latency_s
        Of one message.
    shared
        Whether all devices of one inner member share its one link to this level (a node's
        network card), rather than having one each.
    allreduce_efficiency
        Part of the bandwidth that a ring allreduce over all devices up to this level reaches; above 1
        where a library makes more of a link than one message does.
    allreduce_work_s_per_byte
        Seconds that a core, or a GPU, computes longer for each byte that its rank sends in an allreduce
        beside it.
    """

    name: str
    count: int
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    shared: bool = False
    allreduce_efficiency: float = 1.0
    allreduce_work_s_per_byte: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of device: its memory and its speed relative to the profiled device."""

    name: str = "cpu"
    memory_bytes: int = 0
    relative_speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices and levels of links, inner to outer.

    Attributes
    ----------
    name
        What people call it.
    levels
        Inner to outer; the product of the counts is the number of devices.
    devices
        One kind for all devices, or one entry a device.
    devices_per_node
        How many devices share a host.
    """

    name: str
    levels: tuple[Level, ...]
    devices: tuple[Device, ...] = (Device(),)
    devices_per_node: int = 1

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return math.prod(level.count for level in self.levels)

    def device(self, index: int) -> Device:
        """Return the device at ``index``."""
        return self.devices[0] if len(self.devices) == 1 else self.devices[index]

    def level_between(self, a: int, b: int) -> int:
        """Return the index of the outermost level that a message from device ``a`` to ``b`` crosses."""
        size = 1
        for i, level in enumerate(self.levels):
            size *= level.count
            if a // size == b // size:
                return i
        raise ValueError(f"devices {a} and {b} are outside the cluster of {self.num_devices}")
