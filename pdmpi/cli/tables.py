"""Profiles and plans as tables and as JSON, shared by the commands that show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from pdmpi.cli.output import table
from pdmpi.plan.advise import Advice
from pdmpi.plan.explain import Explanation
from pdmpi.plan.partition import estimate_of
from pdmpi.plan.plan import Plan
from pdmpi.plan.profile import Profile
from pdmpi.plan.units import human_bytes, human_seconds
from pdmpi.simulate.compare import Comparison

__all__ = [
    "advice_lines", "comparison_table", "explanation_lines", "plan_data", "plan_tables", "profile_data",
    "profile_tables", "ranking_table", "shape_of",
]  # fmt: skip


def shape_of(plan: Plan) -> str:
    """Return ``"15-1"``: the replicas of every stage."""
    return "-".join(str(stage.replicas) for stage in plan.stages)


def plan_data(plan: Plan) -> dict[str, Any]:
    """Return a plan for ``--json``."""
    found = estimate_of(plan)
    return {
        "cluster": plan.cluster.name,
        "schedule": plan.schedule,
        "shape": shape_of(plan),
        "num_ranks": plan.num_ranks,
        "microbatch_size": plan.profile.microbatch_size,
        "stages": [
            {
                "stage": s,
                "layers": stage.layers,
                "replicas": stage.replicas,
                "recompute": stage.recompute,
                "ranks": [p.rank for p in plan.placement if p.stage == s],
                "forward_s": cost.forward_s,
                "backward_s": cost.backward_s,
                "sync_s": cost.sync_s,
                "transfer_s": cost.transfer_s,
                "period_s": cost.period_s,
                "bound": cost.bound,
                "in_flight_depth": cost.depth,
                "memory_bytes": cost.memory_bytes,
                "parameter_bytes": cost.parameter_bytes,
                "sent_bytes": cost.sent_bytes,
            }
            for s, (stage, cost) in enumerate(zip(plan.stages, found.stages, strict=True))
        ],
        "prediction": plan.prediction,
        "alternatives_samples_per_s": plan.alternatives,
        "versions": plan.versions,
    }


def _span(values: Sequence[int]) -> str:
    if len(values) > 1 and list(values) == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}-{values[-1]}"
    return ",".join(map(str, values))


def plan_tables(plan: Plan) -> list[Table]:
    """Return a plan for people."""
    found = estimate_of(plan)
    prediction = plan.prediction
    rows = []
    for s, (stage, cost) in enumerate(zip(plan.stages, found.stages, strict=True)):
        first, last = stage.layers[0], stage.layers[-1]
        places = [p for p in plan.placement if p.stage == s]
        rows.append(
            (
                s, f"{len(stage.layers)}: {first} .. {last}", stage.replicas, _span([p.rank for p in places]),
                _span(sorted({p.node for p in places})), human_seconds(cost.forward_s + cost.backward_s),
                human_seconds(cost.period_s), cost.bound, cost.depth, human_bytes(cost.memory_bytes),
                human_bytes(cost.parameter_bytes), human_bytes(cost.sent_bytes),
            )
        )  # fmt: skip
    extra = plan.schedule.extra_in_flight
    title = (
        f"{shape_of(plan)} on {plan.cluster.name}, {plan.schedule.name}"
        f"{f' with {extra} more in flight' if extra else ''}: "
        f"{human_seconds(prediction.period_s)} a microbatch of {plan.profile.microbatch_size}, "
        f"{prediction.samples_per_s:.4g} samples/s"
    )
    columns = (
        "stage", "layers", "replicas", "ranks", "nodes", "compute", "period", "bound by", "in flight",
        "memory", "parameters", "sends",
    )  # fmt: skip
    tables = [table(title, columns, rows)]
    if plan.alternatives:
        chosen = prediction.samples_per_s
        others = [("this plan", f"{chosen:.4g}", "1.00")]
        others += [
            (name, f"{rate:.4g}" if rate else "does not fit", f"{chosen / rate:.2f}" if rate else "")
            for name, rate in plan.alternatives.items()
        ]
        tables.append(
            table("Other ways on the same cluster", ("way", "samples/s", "this plan is faster"), others)
        )
    return tables


def ranking_table(plans: Sequence[Plan]) -> Table:
    """Return several plans side by side, with what they trade."""
    rows = [
        (
            rank, shape_of(plan), f"{plan.prediction.samples_per_s:.4g}",
            human_seconds(plan.prediction.period_s), human_bytes(max(plan.prediction.memory_bytes)),
            human_bytes(sum(plan.prediction.link_bytes)), plan.num_ranks,
            f"{sum(plan.prediction.utilisation) / plan.num_ranks:.0%}",
        )
        for rank, plan in enumerate(plans, start=1)
    ]  # fmt: skip
    columns = (
        "rank", "replicas", "samples/s", "period", "most memory", "bytes a microbatch", "devices",
        "utilisation",
    )  # fmt: skip
    return table("Best plan of each number of stages", columns, rows)


def comparison_table(found: Comparison) -> Table:
    """Return the schedules that were compared, the best first."""
    rows = [
        (one.schedule, f"{one.samples_per_s:.4g}", f"{one.utilisation:.0%}", human_bytes(one.memory_bytes),
         one.in_flight, "yes" if one.stale else "no", "chosen" if one.schedule == found.chosen else one.note)
        if one.samples_per_s
        else (one.schedule, "", "", "", "", "", one.note)
        for one in found.candidates
    ]  # fmt: skip
    columns = ("schedule", "samples/s", "busy", "most memory", "in flight", "stale", "")
    return table("Schedules, simulated", columns, rows)


def advice_lines(found: Advice) -> str:
    """Return the decision table's answers as text, its warnings first."""
    lines = [f"Advice: {found.verdict}."]
    for answer in sorted(found.answers, key=lambda one: not one.advice.startswith("warning")):
        lines.append(f"  {answer.question} {answer.found}: {answer.advice}")
    return "\n".join(lines)


def explanation_lines(found: Explanation) -> str:
    """Return an explanation as text."""
    lines = [f"Bound by {found.bound}: {found.sentence}; {found.ideal_share:.0%} of the ideal throughput."]
    lines += [
        f"  {remedy.change}: {remedy.samples_per_s:.4g} samples/s ({remedy.speed_up:.2f} times)"
        for remedy in found.remedies
    ]
    if not found.remedies:
        lines.append("  Nothing that was tried (faster links, more memory, a split layer) would help.")
    return "\n".join(lines)


def profile_data(profile: Profile) -> dict[str, Any]:
    """Return a profile for ``--json``."""
    return {
        "fingerprint": profile.graph.fingerprint,
        "microbatch_size": profile.microbatch_size,
        "optimizer_state_factor": profile.optimizer_state_factor,
        "machine": profile.machine,
        "layers": [
            {
                "name": layer.name,
                "kind": layer.kind,
                "inputs": [str(ref) for ref in layer.inputs],
                "forward_s": cost.forward_s,
                "backward_s": cost.backward_s,
                "output_bytes": cost.output_bytes,
                "parameter_bytes": cost.parameter_bytes,
                "buffer_bytes": cost.buffer_bytes,
                "saved_bytes": cost.saved_bytes,
                "workspace_bytes": cost.workspace_bytes,
            }
            for layer, cost in zip(profile.graph.layers, profile.costs, strict=True)
        ],
    }


def profile_tables(profile: Profile) -> list[Table]:
    """Return a profile for people."""
    rows = [
        (
            layer.name, layer.kind, human_seconds(cost.forward_s), human_seconds(cost.backward_s),
            human_bytes(cost.output_bytes), human_bytes(cost.parameter_bytes), human_bytes(cost.saved_bytes),
        )
        for layer, cost in zip(profile.graph.layers, profile.costs, strict=True)
    ]  # fmt: skip
    seconds = sum(cost.forward_s + cost.backward_s for cost in profile.costs)
    parameters = sum(cost.parameter_bytes for cost in profile.costs)
    title = (
        f"{len(rows)} layers, {human_seconds(seconds)} a microbatch of {profile.microbatch_size}, "
        f"{human_bytes(parameters)} of parameters"
    )
    return [table(title, ("layer", "kind", "forward", "backward", "output", "parameters", "saved"), rows)]
