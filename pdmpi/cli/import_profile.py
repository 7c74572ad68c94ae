"""``pdmpi import-profile``: read a profile that the original PipeDream wrote."""

from __future__ import annotations

from pathlib import Path

import click

from pdmpi.cli.output import emit, json_option
from pdmpi.cli.tables import profile_data, profile_tables
from pdmpi.plan.hdf5 import check_overwrite
from pdmpi.plan.imported import import_profile
from pdmpi.plan.store import save_profile

__all__ = ["command"]


@click.command()
@click.argument("graph", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Profile to write.")
@click.option("--force", is_flag=True, help="Overwrite the output.")
@click.option("--microbatch-size", type=click.IntRange(1), default=1, show_default=True,
              help="Batch size that was measured; the file does not say.")  # fmt: skip
@json_option
def command(graph: Path, output: Path, force: bool, microbatch_size: int, as_json: bool) -> None:
    """Read a profile (graph.txt) that the original PipeDream wrote.

    \b
    Examples:
      pdmpi import-profile profiles/vgg16/graph.txt --microbatch-size 128 -o vgg16.h5
    """
    check_overwrite(output, force)
    profile = import_profile(graph, microbatch_size)
    save_profile(profile, output, force)
    emit(profile_data(profile), profile_tables(profile), as_json)
