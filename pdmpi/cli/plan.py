"""``pdmpi plan``: cut a profiled model into stages and replicas for a cluster."""

from __future__ import annotations

from pathlib import Path

import click

from pdmpi.cli.output import emit, json_option
from pdmpi.cli.tables import plan_data, plan_tables
from pdmpi.errors import InputError
from pdmpi.plan.cluster_file import load_cluster
from pdmpi.plan.hdf5 import check_overwrite
from pdmpi.plan.partition import partition
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.plan.store import load_profile, save_plan
from pdmpi.plan.terms import SCHEDULES

__all__ = ["command"]


def _shape(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(int(part) for part in text.split("-"))
    except ValueError:
        raise InputError(f"--shape {text!r} is no list of replica counts; write e.g. 2-1-1") from None


@click.command()
@click.argument("profile", type=click.Path(path_type=Path))
@click.option("--cluster", type=click.Path(path_type=Path), required=True, help="Cluster file (TOML).")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Plan to write (HDF5).")
@click.option("--force", is_flag=True, help="Overwrite the output.")
@click.option("--schedule", default="pipedream", show_default=True, help=f"One of: {', '.join(SCHEDULES)}.")
@click.option("--microbatches", type=click.IntRange(1), default=1, show_default=True,
              help="Microbatches of a minibatch, for schedules that flush or accumulate.")  # fmt: skip
@click.option("--shape", help="Fix the replicas of every stage, e.g. 2-1-1.")
@json_option
def command(
    profile: Path, cluster: Path, output: Path | None, force: bool, schedule: str, microbatches: int,
    shape: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Cut a profiled model into stages and replicas for a cluster.

    \b
    Examples:
      pdmpi plan profile.h5 --cluster configs/clusters/laptop.toml -o plan.h5
      pdmpi plan profile.h5 --cluster configs/clusters/a-4x4.toml --shape 15-1 -o plan.h5
    """
    if output is not None:
        check_overwrite(output, force)
    choice = ScheduleChoice(name=schedule, microbatches=microbatches)
    plan = partition(load_profile(profile), load_cluster(cluster), choice, shape=_shape(shape))
    if output is not None:
        save_plan(plan, output, force)
    emit(plan_data(plan), plan_tables(plan), as_json)
