"""``pdmpi show``: what a profile, plan or checkpoint holds."""

from __future__ import annotations

from pathlib import Path

import click

from pdmpi.cli.output import emit, json_option
from pdmpi.cli.tables import plan_data, plan_tables, profile_data, profile_tables
from pdmpi.errors import InputError
from pdmpi.plan.hdf5 import sealed_format
from pdmpi.plan.store import PLAN_FORMAT, PROFILE_FORMAT, load_plan, load_profile

__all__ = ["command"]


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def command(file: Path, as_json: bool) -> None:
    """Say what a profile or plan holds.

    \b
    Examples:
      pdmpi show profile.h5
      pdmpi show plan.h5 --json
    """
    name = sealed_format(file)
    if name == PROFILE_FORMAT.name:
        profile = load_profile(file)
        emit(profile_data(profile), profile_tables(profile), as_json)
    elif name == PLAN_FORMAT.name:
        plan = load_plan(file)
        emit(plan_data(plan), plan_tables(plan), as_json)
    else:
        raise InputError(f"{file} is a {name}; show reads profiles and plans")
