"""The cluster description that people write, as TOML.

::

    name = "a-4x4"
    description = "4 servers of 4 V100 on PCIe, 10 Gbps Ethernet"
    num_devices = 16        # optional; must equal the product of the counts below
    devices_per_node = 4    # how many devices share a host

    [[levels]]              # inner to outer
    name = "pcie"
    count = 4               # members of the level inside that this level joins
    bandwidth = "10 GB/s"   # of one link, each way
    latency = "10 us"

    [[levels]]
    name = "ethernet"
    count = 4
    bandwidth = "10 Gbps"
    latency = "50 us"
    shared = true           # one link a server, not one a device

    [[devices]]             # one kind for all, or several with counts that add up
    name = "V100"
    memory = "16 GiB"
    relative_speed = 1.0    # against the device of the profile
    count = 16              # optional with a single kind
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from pdmpi.errors import InputError, nearest
from pdmpi.plan.cluster import Cluster, Device, Level
from pdmpi.plan.units import parse_bandwidth, parse_bytes, parse_seconds

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["load_cluster", "parse_cluster"]

MAX_DEVICES = 1 << 20
"""Largest cluster that is believed."""


def _quantity(parse: Any) -> BeforeValidator:
    def convert(value: Any) -> Any:
        try:
            return parse(value)
        except InputError as error:
            raise ValueError(str(error)) from None

    return BeforeValidator(convert)


_Bandwidth = Annotated[float, _quantity(parse_bandwidth), Field(gt=0)]
_Seconds = Annotated[float, _quantity(parse_seconds), Field(ge=0)]
_Bytes = Annotated[int, _quantity(parse_bytes), Field(ge=0)]
_Count = Annotated[int, Field(ge=1, le=MAX_DEVICES, strict=True)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class _LevelTable(_Table):
    name: str
    """What joins the members: ``"nvlink"``, ``"ethernet"``."""
    count: _Count
    """Members of the level inside that this level joins."""
    bandwidth: _Bandwidth
    """Of one link, each way at once: ``"10 Gbps"``, ``"30 GB/s"``, or bytes per second."""
    latency: _Seconds = 0.0
    """Of one message: ``"20 us"``, or seconds."""
    shared: bool = False
    """Whether all devices of one inner member share its one link to this level."""
    allreduce_efficiency: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Part of the bandwidth that a ring allreduce reaches; it may be more than one message's, and above 1."""
    allreduce_work_s_per_byte: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds that a core, or a GPU, computes longer for each byte that its rank sends in an allreduce."""


class _DeviceTable(_Table):
    name: str = "cpu"
    """What people call it."""
    memory: _Bytes
    """``"16 GiB"``, or bytes; 0 when it is not to be limited."""
    relative_speed: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Speed against the device that the profile was measured on."""
    count: _Count | None = None
    """Devices of this kind, in device order; may be left out when there is one kind."""


class _ClusterTable(_Table):
    name: str
    """What people call it."""
    description: str = ""
    """For people."""
    num_devices: Annotated[int, Field(ge=1, strict=True)] | None = None
    """Number of devices, as a check on the levels' counts."""
    devices_per_node: _Count
    """Devices that share a host."""
    levels: tuple[_LevelTable, ...] = Field(min_length=1)
    """Inner to outer."""
    devices: tuple[_DeviceTable, ...] = Field(min_length=1)
    """Kinds of devices."""


_KNOWN: Mapping[str, Sequence[str]] = {
    "": tuple(_ClusterTable.model_fields),
    "levels": tuple(_LevelTable.model_fields),
    "devices": tuple(_DeviceTable.model_fields),
}


def _problem(error: Mapping[str, Any]) -> str:
    place = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        table = place[0] if len(place) > 1 else ""
        where = f" in [[{table}]]" if table else ""
        return f"unknown key {place[-1]!r}{where}{nearest(place[-1], _KNOWN[table])}"
    message = error["msg"].removeprefix("Value error, ")
    return (
        f"{'.'.join(place)} = {error['input']!r}: {message}"
        if error["type"] != "missing"
        else (f"{'.'.join(place)} is missing; add it")
    )


def parse_cluster(text: str, source: str = "cluster") -> Cluster:
    """Return the cluster that TOML text describes.

    Raises
    ------
    InputError
        The text is no TOML, a key is unknown or missing, a value is out of range, or the
        counts do not multiply to the number of devices.
    """
    try:
        table = _ClusterTable.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{source} is no TOML: {error}") from None
    except ValidationError as error:
        found = "; ".join(_problem(detail) for detail in error.errors(include_url=False))
        raise InputError(f"{source}: {found}") from None
    total = math.prod(level.count for level in table.levels)
    problems = []
    if total > MAX_DEVICES:
        problems.append(
            f"the levels' counts multiply to {total} devices; at most {MAX_DEVICES} are supported"
        )
    if table.num_devices is not None and table.num_devices != total:
        problems.append(
            f"num_devices = {table.num_devices}, but the levels' counts multiply to {total}; make them agree"
        )
    if total % table.devices_per_node:
        problems.append(f"devices_per_node = {table.devices_per_node} does not divide the {total} devices")
    if len(table.devices) > 1 and any(kind.count is None for kind in table.devices):
        problems.append("give every kind in [[devices]] a count, since there are several")
    elif any(kind.count is not None for kind in table.devices):
        counted = sum(kind.count or 0 for kind in table.devices)
        if counted != total:
            problems.append(f"the counts in [[devices]] add up to {counted}, the levels give {total}")
    InputError.collect(f"{source}: {problem}" for problem in problems)
    kinds = [
        Device(name=kind.name, memory_bytes=kind.memory, relative_speed=kind.relative_speed)
        for kind in table.devices
    ]
    devices = kinds
    if len(kinds) > 1:
        devices = [
            kind for kind, row in zip(kinds, table.devices, strict=True) for _ in range(row.count or 0)
        ]
    return Cluster(
        name=table.name,
        levels=tuple(
            Level(
                name=level.name, count=level.count, bandwidth_bytes_per_s=level.bandwidth,
                latency_s=level.latency, shared=level.shared,
                allreduce_efficiency=level.allreduce_efficiency,
                allreduce_work_s_per_byte=level.allreduce_work_s_per_byte,
            )
            for level in table.levels
        ),
        devices=tuple(devices),
        devices_per_node=table.devices_per_node,
    )  # fmt: skip


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file; see `parse_cluster` for what is refused."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read cluster file {path}: {error}") from None
    return parse_cluster(text, str(path))
