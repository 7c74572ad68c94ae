"""Other ways to use the same cluster: a plan for each schedule, and what is left without a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pdmpi.errors import InputError
from pdmpi.plan.cluster import Cluster
from pdmpi.plan.partition import estimate_of, fits, partition, shortlist
from pdmpi.plan.plan import Plan, ScheduleChoice
from pdmpi.plan.profile import Profile
from pdmpi.plan.terms import SCHEDULES, Terms

__all__ = ["Considered", "candidates", "data_parallel_plan", "with_alternatives"]

_MICROBATCHES_A_STAGE = 4
"""GPipe's bubble is small from four microbatches a stage on (Huang et al. 2019, section 3.3)."""


@dataclass(frozen=True, slots=True)
class Considered:
    """One schedule that was considered: its best plans by the closed form, or why there is none."""

    name: str
    plans: tuple[Plan, ...] = ()
    reason: str = ""


def data_parallel_plan(profile: Profile, cluster: Cluster) -> Plan:
    """Return the plan of one stage with a replica on every device, whether it fits or not."""
    free = replace(cluster, devices=tuple(replace(d, memory_bytes=0) for d in cluster.devices))
    choice = ScheduleChoice(name="data-parallel")
    plan = partition(profile, free, choice, shape=(cluster.num_devices,))
    return replace(plan, cluster=cluster)


def with_alternatives(plan: Plan, predict: Callable[[Plan], Plan] = lambda plan: plan) -> Plan:
    """Return the plan with what data parallelism, model parallelism and GPipe would give.

    GPipe runs straight on all devices with four microbatches a stage, data parallelism with
    a replica on every device, model parallelism with one microbatch in flight; 0 stands for
    what does not fit.

    Parameters
    ----------
    plan
        The plan to compare with.
    predict
        Returns a plan with a better prediction than the closed form, such as the simulator's.
    """
    profile, cluster = plan.profile, plan.cluster
    parallel = predict(data_parallel_plan(profile, cluster))
    rates = {"data-parallel": parallel.prediction.samples_per_s if fits(parallel) else 0.0}
    shape = (1,) * min(cluster.num_devices, len(profile.graph) - 1)
    for name in ("model-parallel", "gpipe"):
        choice = ScheduleChoice(name=name)
        if name == "gpipe":
            many = _MICROBATCHES_A_STAGE * len(shape)
            choice = replace(choice, microbatches=many, recompute="auto")
        try:
            straight = predict(_straight(profile, cluster, choice, len(shape)))
            rates[name] = straight.prediction.samples_per_s
        except InputError:
            rates[name] = 0.0
    return replace(plan, alternatives=rates)


def _straight(profile: Profile, cluster: Cluster, choice: ScheduleChoice, stages: int) -> Plan:
    """Return the straight plan with as many stages as there are cuts for, at most ``stages``."""
    while True:
        try:
            return partition(profile, cluster, choice, shape=(1,) * stages)
        except InputError:
            if stages == 1:
                raise
            stages //= 2


def candidates(profile: Profile, cluster: Cluster, choice: ScheduleChoice) -> list[Considered]:
    """Return the best plans of every schedule (see `shortlist`), or why it has none.

    Schedules that accumulate or flush use ``choice.microbatches``, or, when that is 1, four for
    each device.
    """
    found = []
    for name, terms in SCHEDULES.items():
        microbatches = choice.microbatches
        if terms.accumulates and microbatches == 1:
            microbatches = _MICROBATCHES_A_STAGE * cluster.num_devices
        own = replace(choice, name=name, microbatches=microbatches if terms.accumulates else 1)
        try:
            plans = shortlist(profile, cluster, own)
        except InputError as error:
            found.append(Considered(name, reason=str(error)))
            continue
        problems = [_unsuitable(plan, terms) for plan in plans]
        suitable = tuple(plan for plan, problem in zip(plans, problems, strict=True) if not problem)
        found.append(Considered(name, suitable, reason="" if suitable else problems[0]))
    return found


def _unsuitable(plan: Plan, terms: Terms) -> str:
    """Return why the schedule's own rules refuse the plan, or nothing."""
    choice = plan.schedule
    if choice.name == "2bw":
        in_flight = max(
            stage.depth * own.replicas
            for stage, own in zip(estimate_of(plan).stages, plan.stages, strict=True)
        )
        if choice.microbatches < in_flight:
            rounds = math.lcm(*(stage.replicas for stage in plan.stages))
            least = -(-in_flight // rounds) * rounds
            return (
                f"accumulates at least as many microbatches as are in flight: microbatches = {least} or more"
            )
    if terms.accumulates and choice.microbatches < len(plan.stages):
        return f"microbatches = {choice.microbatches} leave {len(plan.stages)} stages mostly idle"
    return ""
