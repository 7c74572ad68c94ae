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
from pdmpi.plan.cuts import cuts_of
from pdmpi.plan.plan import Placement, Plan, ScheduleChoice, StagePlan
from pdmpi.plan.predict import estimate
from pdmpi.plan.pricing import Found, Problem
from pdmpi.plan.profile import Profile
from pdmpi.plan.search import search

__all__ = ["partition"]


def partition(
    profile: Profile, cluster: Cluster, schedule: ScheduleChoice | None = None, *, shape: Sequence[int] = ()
) -> Plan:
    """Return the plan with the smallest period that fits the devices' memory.

    Parameters
    ----------
    profile
        Measured layer graph.
    cluster
        Devices and links.
    schedule
        Schedule and its parameters; PipeDream's by default.
    shape
        Replicas of every stage, to fix them: ``(2, 1, 1)``.

    Raises
    ------
    InputError
        Nothing fits the memory, or the model has no parameters.
    """
    choice = schedule or ScheduleChoice()
    if not any(cost.parameter_bytes for cost in profile.costs):
        raise InputError("no layer of the profile has parameters: there is nothing to train")
    cuts = cuts_of(profile)
    if shape and (min(shape) < 1 or sum(shape) > cluster.num_devices):
        wanted = "-".join(map(str, shape))
        raise InputError(
            f"shape {wanted} needs {sum(shape)} devices, cluster {cluster.name!r} has {cluster.num_devices}"
        )
    if len(shape) > len(cuts) - 1:
        raise InputError(
            f"shape has {len(shape)} stages, the model only {len(cuts) - 1} layers; use fewer stages"
        )
    problem = Problem(
        cuts=cuts, cluster=cluster, choice=choice, recompute=choice.recompute, shape=tuple(shape)
    )
    problems = variants(problem)
    best = search(problems)
    if best is None:
        raise InputError("does not fit")
    return plan_of(*best)


def variants(problem: Problem) -> list[Problem]:
    """Return a problem with every number of copies, and without some kinds of devices where they differ."""
    cluster = problem.cluster
    found = [replace(problem, copies=n) for n in ([1] if problem.shape else copies_of(cluster))]
    return found + [replace(problem, order=order) for order in device_subsets(cluster)]


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
    total, size, sizes = cluster.num_devices, 1, []
    for level in cluster.levels:
        size *= level.count
        sizes.append(size)
    return [
        copies
        for copies in range(1, total)
        if total % copies == 0
        and all((total // copies) % size == 0 or size % (total // copies) == 0 for size in sizes)
    ]


def stages_of(problem: Problem, found: Found) -> tuple[list[StagePlan], list[list[int]]]:
    """Return the stages of a partition and the devices of their replicas."""
    stages = [
        StagePlan(
            layers=problem.cuts.layers(s.outer, s.inner),
            replicas=s.replicas * found.copies,
            recompute=s.recompute,
        )
        for s in found.stages
    ]
    devices = [problem.devices(s.first, s.replicas) for s in found.stages]
    return stages, devices


def plan_of(problem: Problem, found: Found) -> Plan:
    """Return a partition as a plan, with its prediction."""
    profile, cluster, choice = problem.cuts.profile, problem.cluster, problem.choice
    stages, devices = stages_of(problem, found)
    placement: list[Placement] = []
    for s, group in enumerate(devices):
        for r, device in enumerate(group):
            node, own = divmod(device, cluster.devices_per_node)
            placement.append(Placement(stage=s, replica=r, rank=len(placement), node=node, device=own))
    return Plan(
        profile=profile,
        cluster=cluster,
        schedule=choice,
        stages=tuple(stages),
        placement=tuple(placement),
        prediction=estimate(profile, cluster, choice, stages, devices, found.copies).prediction,
        versions=tool_versions(),
    )


def tool_versions() -> Mapping[str, str]:
    """Return the versions of what makes plans."""
    return {
        "h5py": h5py.__version__,
        "numpy": np.__version__,
        "pdmpi": __version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
