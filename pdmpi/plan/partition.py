"""From a profile and a cluster to a plan."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import h5py
import numpy as np

from pdmpi import __version__
from pdmpi.errors import InputError
from pdmpi.plan.cluster import Cluster
from pdmpi.plan.cuts import Cuts, cuts_of, shared_layers
from pdmpi.plan.folded import folded_plan, is_folded
from pdmpi.plan.plan import Plan, ScheduleChoice, StagePlan
from pdmpi.plan.predict import Estimate, estimate, place
from pdmpi.plan.pricing import Found, Problem
from pdmpi.plan.profile import Profile
from pdmpi.plan.search import MANY, by_stages, search, smallest_memory
from pdmpi.plan.terms import terms_of

__all__ = ["copies_of", "estimate_of", "fits", "partition", "shortlist", "top_plans"]

_MOST_COMPARED = 4
_MANY_DEVICES = 16
_MUCH_SLOWER = 1.2


def partition(
    profile: Profile,
    cluster: Cluster,
    schedule: ScheduleChoice | None = None,
    *,
    shape: Sequence[int] = (),
) -> Plan:
    """Return the plan with the smallest period that fits the devices' memory.

    The smallest steady period is found exactly (`pdmpi.plan.search` says over what).  Where
    that plan does not reach it, since the microbatches in flight do not cover its transfers
    or since it flushes, the best plans of up to four stages are compared with it by their
    whole prediction.

    Parameters
    ----------
    profile
        Measured layer graph.
    cluster
        Devices and links.
    schedule
        Schedule and its parameters; PipeDream's by default.  ``recompute`` may be ``"auto"``:
        stages that do not fit otherwise recompute their activations.
    shape
        Replicas of every stage, to fix them: ``(2, 1, 1)``.

    Raises
    ------
    InputError
        Nothing fits the memory, the model has no parameters, or the shape is impossible.
    """
    choice = schedule or ScheduleChoice()
    cuts = _checked(profile, cluster, choice, shape)
    if is_folded(choice):
        return _finished(folded_plan(cuts, cluster, choice))
    problems = variants(_problem(cuts, cluster, choice, shape))
    best = search(problems)
    if best is None:
        raise _does_not_fit(problems[0])
    plan = plan_of(*best)
    found = estimate_of(plan)
    if plan.prediction.period_s > found.steady_s * 1.001 and not shape and best[0].positions <= MANY:
        others = [
            plan_of(best[0], other) for other in by_stages(best[0], _MOST_COMPARED, plan.prediction.period_s)
        ]
        plan = min([plan, *others], key=lambda plan: plan.prediction.period_s)
    return _finished(plan)


def top_plans(profile: Profile, cluster: Cluster, schedule: ScheduleChoice, count: int) -> list[Plan]:
    """Return the best plan of each number of stages, the ``count`` best of them, best first.

    Raises
    ------
    InputError
        Nothing fits the memory, or the model has no parameters.
    """
    cuts = _checked(profile, cluster, schedule, ())
    if is_folded(schedule):
        return [partition(profile, cluster, schedule)]
    best: dict[int, Plan] = {}
    for problem in variants(_problem(cuts, cluster, schedule, ())):
        for found in by_stages(problem, min(problem.positions, cuts.most_stages, count + 2)):
            plan, stages = plan_of(problem, found), len(found.stages)
            if stages not in best or plan.prediction.period_s < best[stages].prediction.period_s * (
                1 - 1e-12
            ):
                best[stages] = plan
    chosen = partition(profile, cluster, schedule)
    best.setdefault(len(chosen.stages), chosen)
    ranked = sorted(best.items(), key=lambda item: (item[1].prediction.period_s, item[0]))
    return [_finished(plan) for _, plan in ranked[:count]]


def shortlist(profile: Profile, cluster: Cluster, schedule: ScheduleChoice) -> list[Plan]:
    """Return the plans worth simulating, best first: those of several numbers of stages, or the one best.

    Those that the closed form finds much slower than the best are left out.  Clusters of many
    devices get one, since their simulations take long.

    Raises
    ------
    InputError
        Nothing fits the memory, or the model has no parameters.
    """
    if cluster.num_devices > _MANY_DEVICES:
        return [partition(profile, cluster, schedule)]
    plans = top_plans(profile, cluster, schedule, _MOST_COMPARED)
    limit = plans[0].prediction.period_s * _MUCH_SLOWER
    return [plan for plan in plans if plan.prediction.period_s <= limit]


def _checked(profile: Profile, cluster: Cluster, choice: ScheduleChoice, shape: Sequence[int]) -> Cuts:
    """Return the profile's cuts after refusing what cannot be planned."""
    terms = terms_of(choice)
    if not any(cost.parameter_bytes for cost in profile.costs):
        raise InputError("no layer of the profile has parameters: there is nothing to train")
    cuts = cuts_of(profile)
    if not shape:
        return cuts
    wanted = "-".join(map(str, shape))
    problems = []
    if min(shape) < 1:
        problems.append(f"shape {wanted} has a stage without replicas")
    if sum(shape) > cluster.num_devices:
        problems.append(
            f"shape {wanted} needs {sum(shape)} devices, cluster {cluster.name!r} has {cluster.num_devices}"
        )
    if len(shape) > cuts.most_stages:
        problems.append(
            f"shape {wanted} has {len(shape)} stages, the model can be cut into {cuts.most_stages} at most"
            f"{_shared(profile)}; use fewer stages"
        )
    if terms.single_stage and len(shape) > 1:
        problems.append(f"shape {wanted}: schedule {choice.name!r} takes one stage")
    if terms.straight and max(shape) > 1:
        problems.append(f"shape {wanted}: schedule {choice.name!r} takes one replica a stage")
    if terms.accumulates and any(choice.microbatches % max(m, 1) for m in shape):
        problems.append(
            f"shape {wanted}: schedule.microbatches = {choice.microbatches} must be a multiple of every count"
        )
    InputError.collect(problems)
    return cuts


def _shared(profile: Profile) -> str:
    """Return which layers share a parameter and so stay in one stage, as a part of a sentence."""
    names = [layer.name for layer in profile.graph.layers]
    groups = shared_layers(profile.graph)
    if not groups:
        return ""
    return f" since layers {' and '.join(repr(names[i]) for i in groups[0])} share a parameter"


def _problem(cuts: Cuts, cluster: Cluster, choice: ScheduleChoice, shape: Sequence[int]) -> Problem:
    if choice.name == "model-parallel" and not shape:
        shape = (1,) * min(cluster.num_devices, cuts.most_stages)
    return Problem(cuts=cuts, cluster=cluster, choice=choice, recompute=choice.recompute, shape=tuple(shape))


def variants(problem: Problem) -> list[Problem]:
    """Return a problem with every number of copies, and without some kinds of devices where they differ."""
    cluster = problem.cluster
    found = [replace(problem, copies=n) for n in ([1] if problem.shape else copies_of(cluster))]
    fewer = [order for order in device_subsets(cluster) if len(order) >= sum(problem.shape)]
    return found + [replace(problem, order=order) for order in fewer]


def device_subsets(cluster: Cluster) -> list[tuple[int, ...]]:
    """Return the devices left when kinds are left out: any of up to four kinds, else the slowest ones."""
    kinds = [(d.relative_speed, d.memory_bytes) for d in map(cluster.device, range(cluster.num_devices))]
    distinct = sorted(set(kinds))
    if len(distinct) <= 4:
        sizes = range(1, len(distinct))
        kept = [set(some) for size in sizes for some in itertools.combinations(distinct, size)]
    else:
        kept = [set(distinct[start:]) for start in range(1, len(distinct))]
    return [tuple(d for d, kind in enumerate(kinds) if kind in some) for some in kept]


def copies_of(cluster: Cluster) -> list[int]:
    """Return the numbers of copies of a pipeline that divide the cluster along its levels."""
    total = cluster.num_devices
    sizes = list(itertools.accumulate((level.count for level in cluster.levels), int.__mul__))
    return [
        copies
        for copies in range(1, max(total, 2))
        if total % copies == 0
        and all((total // copies) % size == 0 or size % (total // copies) == 0 for size in sizes)
    ]


def plan_of(problem: Problem, found: Found) -> Plan:
    """Return a partition as a plan, with its prediction."""
    profile, cluster, choice = problem.cuts.profile, problem.cluster, problem.choice
    if choice.recompute == "auto":
        choice = replace(choice, recompute="never")
    stages = [
        StagePlan(
            layers=problem.cuts.layers(s.outer, s.inner),
            replicas=s.replicas * found.copies,
            recompute=s.recompute,
        )
        for s in found.stages
    ]
    devices = [problem.devices(s.first, s.replicas) for s in found.stages]
    return Plan(
        profile=profile,
        cluster=cluster,
        schedule=choice,
        stages=tuple(stages),
        placement=place(cluster, devices),
        prediction=estimate(profile, cluster, choice, stages, devices, found.copies).prediction,
    )


def estimate_of(plan: Plan) -> Estimate:
    """Return what a plan is expected to give, stage by stage."""
    return estimate(plan.profile, plan.cluster, plan.schedule, plan.stages, plan.devices, plan.copies)


def fits(plan: Plan) -> bool:
    """Return whether every device's memory suffices for what a plan is expected to hold there."""
    cluster, needs = plan.cluster, plan.prediction.memory_bytes
    limits = {
        p.rank: cluster.device(p.node * cluster.devices_per_node + p.device).memory_bytes
        for p in plan.placement
    }
    return all(not limit or needs[rank] <= limit for rank, limit in limits.items())


def _finished(plan: Plan) -> Plan:
    return replace(plan, versions=tool_versions())


def _does_not_fit(problem: Problem) -> InputError:
    """Return an error that says what the smallest plan needs, where, and what to try."""
    few, found = smallest_memory(problem)
    plan = plan_of(few, found)
    stages = estimate_of(plan).stages
    fullest = max(range(len(stages)), key=lambda s: stages[s].memory_bytes)
    index = plan.profile.graph.index

    def size(name: str) -> int:
        cost = plan.profile.costs[index[name]]
        return cost.parameter_bytes * 2 + cost.saved_bytes + cost.buffer_bytes + cost.workspace_bytes

    layer = max(plan.stages[fullest].layers, key=size)
    has = max(device.memory_bytes for device in problem.cluster.devices)
    remedies = ["more devices", "a smaller microbatch size", "devices with more memory"]
    if problem.recompute != "auto":
        remedies.insert(0, "recompute = auto")
    if problem.terms.versions is None:
        remedies.insert(1, "schedule 2bw or 1f1b, which keep fewer weight versions")
    return InputError(
        f"the model does not fit {problem.cluster.name!r} under schedule {problem.choice.name!r}: the "
        f"smallest plan needs {found.period_s / 2**30:.3g} GiB at layer {layer!r}, devices have "
        f"{has / 2**30:.3g} GiB; "
        f"try {', '.join(remedies)}"
    )


def tool_versions() -> Mapping[str, str]:
    """Return the versions of what makes plans."""
    return {
        "h5py": h5py.__version__,
        "numpy": np.__version__,
        "pdmpi": __version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
