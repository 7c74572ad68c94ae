"""From a profile and a cluster to a plan."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import h5py
import numpy as np

from pdmpi import __version__
from pdmpi.errors import InputError
from pdmpi.plan.cluster import Cluster
from pdmpi.plan.cuts import Cuts, cuts_of
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
    best: Found | None = None
    if shape and (min(shape) < 1 or sum(shape) > cluster.num_devices):
        wanted = "-".join(map(str, shape))
        raise InputError(
            f"shape {wanted} needs {sum(shape)} devices, cluster {cluster.name!r} has {cluster.num_devices}"
        )
    if len(shape) > len(cuts) - 1:
        raise InputError(
            f"shape has {len(shape)} stages, the model only {len(cuts) - 1} layers; use fewer stages"
        )
    for copies in [1] if shape else copies_of(cluster):
        found = search(
            Problem(
                cuts=cuts,
                cluster=cluster,
                choice=choice,
                copies=copies,
                recompute=choice.recompute,
                shape=tuple(shape),
            ),
            best.period_s * (1 - 1e-9) if best else np.inf,
        )
        best = found or best
    if best is None:
        raise InputError("does not fit")
    return plan_of(cuts, cluster, choice, best)


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


def stages_of(cuts: Cuts, cluster: Cluster, found: Found) -> tuple[list[StagePlan], list[list[int]]]:
    """Return the stages of a partition and the devices of their replicas."""
    part = cluster.num_devices // found.copies
    stages = [
        StagePlan(
            layers=cuts.layers(s.outer, s.inner), replicas=s.replicas * found.copies, recompute=s.recompute
        )
        for s in found.stages
    ]
    devices = [
        [c * part + d for d in range(s.first, s.first + s.replicas) for c in range(found.copies)]
        for s in found.stages
    ]
    return stages, devices


def plan_of(cuts: Cuts, cluster: Cluster, choice: ScheduleChoice, found: Found) -> Plan:
    """Return a partition as a plan, with its prediction."""
    stages, devices = stages_of(cuts, cluster, found)
    placement: list[Placement] = []
    for s, group in enumerate(devices):
        for r, device in enumerate(group):
            node, own = divmod(device, cluster.devices_per_node)
            placement.append(Placement(stage=s, replica=r, rank=len(placement), node=node, device=own))
    return Plan(
        profile=cuts.profile,
        cluster=cluster,
        schedule=choice,
        stages=tuple(stages),
        placement=tuple(placement),
        prediction=estimate(cuts.profile, cluster, choice, stages, devices, found.copies).prediction,
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
