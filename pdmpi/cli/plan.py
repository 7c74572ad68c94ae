"""``pdmpi plan``: cut a profiled model into stages and replicas for a cluster.

The planner's closed form finds the partitions; the simulator chooses among the best and
the depth, and what it says is what the plan predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import RenderableType

from pdmpi.cli.output import emit, json_option, table
from pdmpi.cli.tables import (
    advice_lines,
    comparison_table,
    explanation_lines,
    plan_data,
    plan_tables,
    ranking_table,
)  # fmt: skip
from pdmpi.errors import InputError
from pdmpi.plan.advise import Advice, advise
from pdmpi.plan.alternatives import candidates, data_parallel_plan, with_alternatives
from pdmpi.plan.cluster import Cluster
from pdmpi.plan.cluster_file import load_cluster
from pdmpi.plan.explain import Explanation, explain
from pdmpi.plan.hdf5 import check_overwrite
from pdmpi.plan.partition import partition, shortlist, top_plans
from pdmpi.plan.plan import Plan, ScheduleChoice
from pdmpi.plan.profile import Profile
from pdmpi.plan.published import COST_MODELS, published_plan
from pdmpi.plan.store import load_profile, save_plan
from pdmpi.plan.terms import SCHEDULES
from pdmpi.simulate.compare import Comparison, compare
from pdmpi.simulate.settle import best_settled, over_memory, settled

__all__ = ["command"]

_RECOMPUTE = ("auto", "never", "except-last", "always")


@dataclass(frozen=True)
class _Answer:
    """What was planned for one cluster."""

    plan: Plan
    ranking: Sequence[Plan] = ()
    comparison: Comparison | None = None
    advice: Advice | None = None
    explanation: Explanation | None = None


def _shape(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(int(part) for part in text.split("-"))
    except ValueError:
        raise InputError(f"--shape {text!r} is no list of replica counts; write e.g. 2-1-1") from None


def _extra(text: str) -> int | None:
    """Return the number of more microbatches in flight, or None for auto."""
    if text == "auto":
        return None
    try:
        extra = int(text)
    except ValueError:
        extra = -1
    if extra < 0:
        raise InputError(f"--extra-in-flight {text!r} is neither a number of at least 0 nor 'auto'")
    return extra


@click.command()
@click.argument("profile", type=click.Path(path_type=Path))
@click.option("--cluster", "clusters", type=click.Path(path_type=Path), required=True, multiple=True,
              help="Cluster file (TOML); give it several times to compare.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Plan to write (HDF5).")
@click.option("--force", is_flag=True, help="Overwrite the output.")
@click.option("--schedule", default="pipedream", show_default=True,
              help=f"auto (compare all), or one of: {', '.join(SCHEDULES)}.")  # fmt: skip
@click.option("--microbatches", type=click.IntRange(1), default=1, show_default=True,
              help="Microbatches of a minibatch, for schedules that flush or accumulate.")  # fmt: skip
@click.option("--recompute", type=click.Choice(_RECOMPUTE), default="auto", show_default=True,
              help="Which stages recompute activations; auto: those that do not fit otherwise.")  # fmt: skip
@click.option("--extra-in-flight", default="auto", show_default=True,
              help="More minibatches in flight; auto: as few as suffice, and fit.")  # fmt: skip
@click.option("--shape", help="Fix the replicas of every stage, e.g. 2-1-1.")
@click.option("--top", type=click.IntRange(1), default=1, show_default=True,
              help="Rank the best plans of this many numbers of stages.")  # fmt: skip
@click.option("--explain", "explained", is_flag=True, help="Say what bounds the period and what would help.")
@click.option("--cost-model", type=click.Choice(["pdmpi", *COST_MODELS]), default="pdmpi", show_default=True,
              help="Plan under PipeDream's own model, as coded or as printed, to compare.")  # fmt: skip
@json_option
def command(
    profile: Path, clusters: tuple[Path, ...], output: Path | None, force: bool, schedule: str,
    microbatches: int, recompute: str, extra_in_flight: str, shape: str | None, top: int, explained: bool,
    cost_model: str, as_json: bool,
) -> None:  # fmt: skip
    """Cut a profiled model into stages and replicas for a cluster.

    Needs no torch and no MPI.  The prediction is the simulator's: pdmpi simulate says the same.
    With several clusters the plans are compared and the fastest is written.

    \b
    Examples:
      pdmpi plan profile.h5 --cluster configs/clusters/laptop.toml -o plan.h5
      pdmpi plan profile.h5 --cluster configs/clusters/a-4x4.toml --explain --top 5
      pdmpi plan profile.h5 --cluster a.toml --cluster b.toml --schedule auto --microbatches 32
      pdmpi plan profile.h5 --cluster configs/clusters/a-4x4.toml --shape 15-1 -o plan.h5
    """
    if output is not None:
        check_overwrite(output, force)
    extra, replicas = _extra(extra_in_flight), _shape(shape)
    if cost_model != "pdmpi" and (schedule != "pipedream" or shape or top > 1):
        raise InputError(
            f"--cost-model {cost_model} plans pipedream only; leave out --schedule, --shape and --top"
        )
    if schedule == "auto" and (shape or top > 1):
        raise InputError("--schedule auto compares schedules; leave out --shape and --top")
    model = load_profile(profile)
    choice = ScheduleChoice(
        name=schedule, microbatches=microbatches, extra_in_flight=extra or 0, recompute=recompute
    )
    answers = []
    for path in clusters:
        answer = _planned(model, load_cluster(path), choice, cost_model, replicas, top, extra)
        plan = with_alternatives(answer.plan, settled)
        parallel = settled(data_parallel_plan(model, plan.cluster))
        advice = advise(model, plan.cluster, plan.schedule.microbatches, plan, parallel)
        explanation = explain(plan) if explained else None
        answers.append(_Answer(plan, answer.ranking, answer.comparison, advice, explanation))
    best = max(answers, key=lambda answer: answer.plan.prediction.samples_per_s)
    if output is not None:
        save_plan(best.plan, output, force)
    emit(_data(answers), _tables(answers), as_json)


def _planned(
    profile: Profile, cluster: Cluster, choice: ScheduleChoice, cost_model: str, shape: tuple[int, ...],
    top: int, extra: int | None,
) -> _Answer:  # fmt: skip
    if cost_model != "pdmpi":
        return _Answer(settled(published_plan(profile, cluster, cost_model), extra))
    if choice.name == "auto":
        return _compared(profile, cluster, choice, extra)
    if top > 1:
        ranking = best_settled(top_plans(profile, cluster, choice, top), extra)
        return _Answer(ranking[0], ranking=ranking)
    if shape:
        return _Answer(settled(partition(profile, cluster, choice, shape=shape), extra))
    return _Answer(best_settled(shortlist(profile, cluster, choice), extra)[0])


def _compared(profile: Profile, cluster: Cluster, choice: ScheduleChoice, extra: int | None) -> _Answer:
    """Return the plan of the schedule that the simulator finds best, and how they compare."""
    plans: dict[str, Plan | str] = {}
    for one in candidates(profile, cluster, choice):
        try:
            plans[one.name] = best_settled(one.plans, extra)[0] if one.plans else one.reason
        except InputError as error:
            plans[one.name] = str(error)
    comparison = compare(plans)
    chosen = plans[comparison.chosen]
    assert isinstance(chosen, Plan)
    return _Answer(chosen, comparison=comparison)


def _data(answers: Sequence[_Answer]) -> object:
    found = []
    for answer in answers:
        entry = plan_data(answer.plan)
        if answer.ranking:
            entry["ranking"] = [plan_data(plan) for plan in answer.ranking]
        if answer.comparison:
            entry["considered"] = answer.comparison.candidates
            entry["why"] = answer.comparison.why
        if answer.advice:
            entry["advice"] = answer.advice.answers
        if answer.explanation:
            entry["explanation"] = answer.explanation
        found.append(entry)
    return found[0] if len(found) == 1 else {"plans": found}


def _tables(answers: Sequence[_Answer]) -> list[RenderableType]:
    shown: list[RenderableType] = []
    for answer in answers:
        shown += plan_tables(answer.plan)
        if answer.ranking:
            shown.append(ranking_table(answer.ranking))
        if answer.comparison:
            shown += [comparison_table(answer.comparison), f"Chosen: {answer.comparison.why}."]
        if answer.advice:
            shown.append(advice_lines(answer.advice))
        if answer.explanation:
            shown.append(explanation_lines(answer.explanation))
        if reason := over_memory(answer.plan):
            shown.append(f"Warning: {reason}, by simulation; give --recompute always or --extra-in-flight 0.")
    if len(answers) > 1:
        rows = [
            (a.plan.cluster.name, a.plan.cluster.num_devices, f"{a.plan.prediction.samples_per_s:.4g}")
            for a in answers
        ]
        shown.append(table("Clusters", ("cluster", "devices", "samples/s"), rows))
    return shown
