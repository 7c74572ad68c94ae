"""``pdmpi show``: what a profile, plan or checkpoint holds."""

from __future__ import annotations

from pathlib import Path

import click

from pdmpi.cli.checkpoint_tables import checkpoint_data, checkpoint_tables, find_checkpoint
from pdmpi.cli.output import emit, json_option
from pdmpi.cli.tables import plan_data, plan_tables, profile_data, profile_tables
from pdmpi.errors import InputError
from pdmpi.plan.draw import draw_plan
from pdmpi.plan.draw_graph import draw_graph
from pdmpi.plan.hdf5 import check_overwrite, sealed_format
from pdmpi.plan.store import PLAN_FORMAT, PROFILE_FORMAT, load_plan, load_profile

__all__ = ["command"]


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--plot", type=click.Path(path_type=Path), help="Draw a plan (PNG, SVG, PDF).")
@click.option("--graph", type=click.Path(path_type=Path), help="Draw the layer graph with times and sizes.")
@click.option("--force", is_flag=True, help="Overwrite the pictures.")
@json_option
def command(file: Path, plot: Path | None, graph: Path | None, force: bool, as_json: bool) -> None:
    """Say what a profile, plan or checkpoint holds.

    FILE is a profile or a plan, or the directory of a checkpoint or of a run (whose newest good
    checkpoint is shown).

    \b
    Examples:
      pdmpi show profile.h5 --graph graph.svg
      pdmpi show plan.h5 --plot plan.png
      pdmpi show plan.h5 --json
      pdmpi show runs/digits
    """
    for picture in (plot, graph):
        if picture is not None:
            check_overwrite(picture, force)
    if file.is_dir():
        if plot is not None or graph is not None:
            raise InputError(f"{file} is no plan; drawings are of plans and profiles")
        checkpoint = find_checkpoint(file)
        emit(checkpoint_data(checkpoint), checkpoint_tables(checkpoint), as_json)
        return
    name = sealed_format(file)
    if name == PROFILE_FORMAT.name:
        if plot is not None:
            raise InputError(f"--plot draws plans, {file} is a profile; use --graph, or plan it first")
        profile = load_profile(file)
        if graph is not None:
            draw_graph(profile, graph)
        emit(profile_data(profile), profile_tables(profile), as_json)
    elif name == PLAN_FORMAT.name:
        plan = load_plan(file)
        if plot is not None:
            draw_plan(plan, plot)
        if graph is not None:
            draw_graph(plan.profile, graph, plan.stages)
        emit(plan_data(plan), plan_tables(plan), as_json)
    else:
        raise InputError(f"{file} is a {name}; show reads profiles and plans")
