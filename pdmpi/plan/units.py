"""Quantities with units, as people write them: ``"10 Gbps"``, ``"16 GiB"``, ``"5 us"``."""

from __future__ import annotations

import math
import re

from pdmpi.errors import InputError

__all__ = ["human_bytes", "human_seconds", "parse_bandwidth", "parse_bytes", "parse_seconds"]

_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGT", start=1)}
_BYTES = {f"{prefix}B": factor for prefix, factor in (_PREFIX | _BINARY).items()}
_BANDWIDTH = {
    **{f"{unit}/s": factor for unit, factor in _BYTES.items()},
    **{f"{prefix}bps": factor / 8 for prefix, factor in _PREFIX.items()},
    **{f"{prefix}bit/s": factor / 8 for prefix, factor in _PREFIX.items()},
}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*(\S+)\s*")


def _parse(value: str | float, units: dict[str, float], example: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InputError(f"{value!r} is no quantity; write e.g. {example!r}")
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value)
        if match is None or match[2] not in units:
            raise InputError(f"{value!r} is no quantity; write e.g. {example!r} ({', '.join(units)})")
        number = float(match[1]) * units[match[2]]
    else:
        number = float(value)
    if not math.isfinite(number) or number < 0:
        raise InputError(f"{value!r} must be finite and not negative")
    return number


def parse_bandwidth(value: str | float) -> float:
    """Return bytes per second; a bare number is bytes per second already."""
    return _parse(value, _BANDWIDTH, "10 Gbps")


def parse_bytes(value: str | float) -> int:
    """Return bytes; a bare number is bytes already."""
    return round(_parse(value, _BYTES, "16 GiB"))


def parse_seconds(value: str | float) -> float:
    """Return seconds; a bare number is seconds already."""
    return _parse(value, _SECONDS, "5 us")


def human_bytes(count: float) -> str:
    """Return ``"1.5 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """Return ``"1.5 ms"``."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"
