"""Profiles and plans on disk, and a plan as bytes for a broadcast."""

from __future__ import annotations

from pathlib import Path

from pdmpi.plan import layout
from pdmpi.plan.hdf5 import Format, pack, read_bytes, read_file, unpack, write_file
from pdmpi.plan.plan import Plan
from pdmpi.plan.profile import Profile

__all__ = [
    "PLAN_FORMAT", "PROFILE_FORMAT", "load_plan", "load_profile", "plan_from_bytes", "plan_to_bytes",
    "save_plan", "save_profile",
]  # fmt: skip

PROFILE_FORMAT = Format(name="pdmpi-profile", version=5, datasets=layout.PROFILE_DATASETS)
PLAN_FORMAT = Format(name="pdmpi-plan", version=7, datasets=layout.PLAN_DATASETS)


def save_profile(profile: Profile, path: Path, force: bool = False) -> None:
    """Write a profile; refuse to overwrite unless `force`."""
    write_file(Path(path), layout.profile_arrays(profile), PROFILE_FORMAT, force)


def load_profile(path: Path) -> Profile:
    """Read a profile, checked; anything off raises `InputError` with the reason."""
    return layout.guarded(layout.profile_from, read_file(Path(path), PROFILE_FORMAT), str(path))


def plan_to_bytes(plan: Plan) -> bytes:
    """Return the plan as a sealed HDF5 image; equal plans give equal bytes."""
    return pack(layout.plan_arrays(plan), PLAN_FORMAT)


def plan_from_bytes(data: bytes, source: str = "the plan") -> Plan:
    """Read a plan from an image, checked; anything off raises `InputError` with the reason."""
    return layout.guarded(layout.plan_from, unpack(data, PLAN_FORMAT, source), source)


def save_plan(plan: Plan, path: Path, force: bool = False) -> None:
    """Write a plan; refuse to overwrite unless `force`."""
    write_file(Path(path), layout.plan_arrays(plan), PLAN_FORMAT, force)


def load_plan(path: Path) -> Plan:
    """Read a plan, checked; anything off raises `InputError` with the reason."""
    return plan_from_bytes(read_bytes(Path(path)), str(path))
