"""Plans whose ranks play several stages: interleaved 1F1B deals them in turn, ZB-V lays them out as a V.

The stages are cut so that the largest is as small as can be, for every number of places
that the cluster allows; replicas are equal everywhere.
"""

from __future__ import annotations

from dataclasses import replace

from pdmpi.errors import InputError
from pdmpi.plan.cluster import Cluster, Device, Level
from pdmpi.plan.cuts import Cuts
from pdmpi.plan.plan import Plan, ScheduleChoice, StagePlan
from pdmpi.plan.predict import estimate, place
from pdmpi.plan.pricing import Problem
from pdmpi.plan.search import search

__all__ = ["CHUNKS", "folded_plan", "is_folded"]

CHUNKS = 2
"""Stages that one rank plays."""


def is_folded(choice: ScheduleChoice) -> bool:
    """Return whether ranks of this schedule play several stages."""
    return choice.name in ("interleaved", "zb-v")


def folded_plan(cuts: Cuts, cluster: Cluster, choice: ScheduleChoice) -> Plan:
    """Return the plan with the smallest predicted period that fits.

    Raises
    ------
    InputError
        There are fewer layers than stages, or nothing fits the memory.
    """
    plans = [
        plan
        for places in range(1, cluster.num_devices + 1)
        if cluster.num_devices % places == 0 and choice.microbatches % (cluster.num_devices // places) == 0
        and CHUNKS * places <= cuts.most_stages
        for plan in [_with_places(cuts, cluster, choice, places)]
        if _fits(plan)
    ]  # fmt: skip
    if not plans:
        raise InputError(
            f"schedule {choice.name!r} finds no plan: {cuts.most_stages} layers in {CHUNKS} stages a device "
            f"do not fit cluster {cluster.name!r}; use fewer devices, more memory, or schedule 1f1b"
        )
    return min(plans, key=lambda plan: plan.prediction.period_s)


def _with_places(cuts: Cuts, cluster: Cluster, choice: ScheduleChoice, places: int) -> Plan:
    """Return the best balanced plan of ``places`` places, each of equally many replicas."""
    outermost = min(cluster.levels, key=lambda level: level.bandwidth_bytes_per_s)
    stages = CHUNKS * places
    flat = Cluster(
        name=cluster.name,
        levels=(
            Level(name=outermost.name, count=stages, bandwidth_bytes_per_s=outermost.bandwidth_bytes_per_s),
        ),
        devices=(Device(),),
    )
    balanced = Problem(cuts=cuts, cluster=flat, choice=replace(choice, name="1f1b"), shape=(1,) * stages)
    found = search([balanced])
    assert found is not None
    replicas = cluster.num_devices // places
    own = [list(range(p * replicas, (p + 1) * replicas)) for p in range(places)]
    at = [*range(places), *(reversed(range(places)) if choice.name == "zb-v" else range(places))]
    devices = [own[p] for p in at]
    again = choice.recompute == "always"
    plan = [
        StagePlan(layers=cuts.layers(s.outer, s.inner), replicas=replicas, recompute=again)
        for s in found[1].stages
    ]
    if choice.recompute == "auto":
        choice = replace(choice, recompute="never")
    return Plan(
        profile=cuts.profile,
        cluster=cluster,
        schedule=choice,
        stages=tuple(plan),
        placement=place(cluster, devices),
        prediction=estimate(cuts.profile, cluster, choice, plan, devices).prediction,
    )


def _fits(plan: Plan) -> bool:
    limit = min((d.memory_bytes for d in plan.cluster.devices if d.memory_bytes), default=0)
    return not limit or max(plan.prediction.memory_bytes) <= limit
