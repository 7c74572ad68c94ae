"""When to choose which schedule: the decision table, as data and as advice on a plan.

The rules are those of GPipe's experience (Huang et al., NeurIPS 2019, sections 2.3 and 5) and
PipeDream's comparison (Narayanan et al., SOSP 2019, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass

from pdmpi.plan.plan import Plan

__all__ = ["MICROBATCHES_A_STAGE", "SMALL_BATCH", "Advice", "advice"]

MICROBATCHES_A_STAGE = 4
"""From so many microbatches a stage on, the bubble of a flushed schedule costs little."""

SMALL_BATCH = 8
"""BatchNorm's statistics over fewer samples are noisy."""

_FLUSHED = ("gpipe", "1f1b", "interleaved")
_UNEVEN = 1.25


@dataclass(frozen=True, slots=True)
class Advice:
    """One piece of advice.

    Attributes
    ----------
    rule
        Short name.
    warning
        Whether it warns of this plan, rather than naming another choice.
    text
        One line for people.
    """

    rule: str
    warning: bool
    text: str


def advice(plan: Plan) -> tuple[Advice, ...]:
    """Return what the decision table says of a plan."""
    found = [_memory_fits(plan), _uneven(plan), _few_microbatches(plan), _small_batch_norm(plan)]
    return tuple(item for item in found if item is not None)


def _memory_fits(plan: Plan) -> Advice | None:
    profile, cluster = plan.profile, plan.cluster
    memory = min(device.memory_bytes for device in cluster.devices)
    parameters = sum(cost.parameter_bytes for cost in profile.costs)
    held = sum(cost.saved_bytes + cost.buffer_bytes for cost in profile.costs)
    workspace = max((cost.workspace_bytes for cost in profile.costs), default=0)
    needed = round(parameters * (2 + profile.optimizer_state_factor)) + held + workspace
    if len(plan.stages) == 1 or not memory or needed > memory:
        return None
    text = (
        f"the whole model trains in {needed / 2**20:.0f} MiB, which every device has: try schedule "
        "'data-parallel', unless its gradients are slow to sum over this network"
    )
    return Advice("memory-fits", False, text)


def _uneven(plan: Plan) -> Advice | None:
    cost = {
        layer.name: c.forward_s + c.backward_s
        for layer, c in zip(plan.profile.graph.layers, plan.profile.costs, strict=True)
    }
    work = [sum(cost[name] for name in stage.layers) / stage.replicas for stage in plan.stages]
    mean = sum(work) / len(work)
    if len(work) == 1 or max(work) <= _UNEVEN * mean:
        return None
    slowest = max(range(len(work)), key=work.__getitem__)
    text = (
        f"stage {slowest} works {max(work) / mean:.2f} times as long as the average: gpipe and 1f1b want "
        "uniform stages; 'pipedream' with replicas of the slow stage, or fewer stages, wastes less"
    )
    return Advice("uneven-stages", False, text)


def _few_microbatches(plan: Plan) -> Advice | None:
    stages, microbatches = len(plan.stages), plan.schedule.microbatches
    if plan.schedule.name not in _FLUSHED or microbatches >= MICROBATCHES_A_STAGE * stages or stages == 1:
        return None
    bubble = (stages - 1) / (microbatches + stages - 1)
    fewer = max(1, microbatches // MICROBATCHES_A_STAGE)
    text = (
        f"{microbatches} microbatches over {stages} stages leave {100 * bubble:.0f} % of the time idle: set "
        f"schedule.microbatches to {MICROBATCHES_A_STAGE * stages} or more, or plan {fewer} stages"
    )
    return Advice("few-microbatches", True, text)


def _small_batch_norm(plan: Plan) -> Advice | None:
    size = plan.profile.microbatch_size
    norms = [layer.name for layer in plan.profile.graph.layers if layer.kind.startswith("BatchNorm")]
    if not norms or size >= SMALL_BATCH or plan.schedule.microbatches == 1:
        return None
    text = (
        f"layer {norms[0]!r} normalises over microbatches of {size}: take fewer microbatches, so that each "
        f"has {SMALL_BATCH} samples or more, or a norm that does not look across the batch"
    )
    return Advice("small-batch-norm", True, text)
