"""``pdmpi advise``: whether pipelining pays for a model on a cluster."""

from __future__ import annotations

from pathlib import Path

import click

from pdmpi.cli.output import emit, json_option, table
from pdmpi.cli.tables import shape_of
from pdmpi.plan.advise import advise
from pdmpi.plan.alternatives import data_parallel_plan
from pdmpi.plan.cluster_file import load_cluster
from pdmpi.plan.partition import partition
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.plan.store import load_profile
from pdmpi.simulate.settle import settled

__all__ = ["command"]


@click.command()
@click.argument("profile", type=click.Path(path_type=Path))
@click.option("--cluster", type=click.Path(path_type=Path), required=True, help="Cluster file (TOML).")
@click.option("--microbatches", type=click.IntRange(1), default=1, show_default=True,
              help="Microbatches that a minibatch can be split into.")  # fmt: skip
@json_option
def command(profile: Path, cluster: Path, microbatches: int, as_json: bool) -> None:
    """Say whether pipelining pays for a model on a cluster.

    \b
    Examples:
      pdmpi advise profile.h5 --cluster configs/clusters/a-4x4.toml
      pdmpi advise profile.h5 --cluster configs/clusters/h100-1x8.toml --microbatches 32
    """
    model, where = load_profile(profile), load_cluster(cluster)
    plan = settled(partition(model, where, ScheduleChoice(recompute="auto")))
    found = advise(model, where, microbatches, plan, settled(data_parallel_plan(model, where)))
    data = {
        "pipeline": found.pipeline,
        "verdict": found.verdict,
        "answers": found.answers,
        "shape": shape_of(found.plan),
        "samples_per_s": found.plan.prediction.samples_per_s,
        "data_parallel_samples_per_s": found.data_parallel.prediction.samples_per_s,
    }
    rows = [(answer.question, answer.found, answer.advice) for answer in found.answers]
    title = "Should I pipeline?"
    emit(data, [table(title, ("question", "here", "so"), rows), f"Verdict: {found.verdict}."], as_json)
