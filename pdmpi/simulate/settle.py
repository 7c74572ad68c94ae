"""From the planner's closed form to the plan that is written: its depth chosen, its prediction simulated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pdmpi.errors import InputError
from pdmpi.plan.plan import Plan, Prediction
from pdmpi.schedule.topology import topology_of
from pdmpi.simulate.auto_depth import auto_depth
from pdmpi.simulate.forecast import Forecast, forecast, memory_limits, steady_minibatches

__all__ = ["best_settled", "over_memory", "predicted", "settled"]

_MOST_STEPS = 200_000
"""Microbatches times stages up to which a plan is simulated: seconds."""


def settled(plan: Plan, extra_in_flight: int | None = None) -> Plan:
    """Return the plan with its depth fixed, and what the simulator says of it as its prediction.

    Plans whose shortest steady run is too long to simulate (hundreds of ranks, or replica counts
    without common factors) keep the closed form and, for automatic depth, no extra minibatches.

    Parameters
    ----------
    plan
        As the planner made it.
    extra_in_flight
        Minibatches in flight beyond the depth; ``None`` for as few as keep the bottleneck busy.

    Raises
    ------
    InputError
        When the schedule does not take the plan's shape, or this many in flight.
    """
    fixed = replace(plan, schedule=replace(plan.schedule, extra_in_flight=extra_in_flight or 0))
    if not _can_simulate(fixed):
        return fixed
    if extra_in_flight is None:
        depth = auto_depth(fixed)
        fixed = replace(fixed, schedule=replace(fixed.schedule, extra_in_flight=depth.extra_in_flight))
    return replace(fixed, prediction=predicted(fixed, forecast(fixed)))


def predicted(plan: Plan, found: Forecast) -> Prediction:
    """Return a forecast as a plan's prediction."""
    report = found.report
    return Prediction(
        period_s=report.period_s,
        samples_per_s=report.samples_per_s,
        utilisation=tuple(rank.utilisation for rank in report.ranks),
        memory_bytes=tuple(rank.memory_bytes for rank in report.ranks),
        link_bytes=plan.prediction.link_bytes,
    )


def best_settled(plans: Iterable[Plan], extra_in_flight: int | None = None) -> list[Plan]:
    """Return plans settled, those that fit the memory first, the fastest first.

    Raises
    ------
    InputError
        When the schedule takes none of them; the first one's reason.
    """
    found, reasons = [], []
    for plan in plans:
        try:
            found.append(settled(plan, extra_in_flight))
        except InputError as error:
            reasons.append(error)
    if not found:
        raise reasons[0]
    return sorted(found, key=lambda plan: (bool(over_memory(plan)), plan.prediction.period_s))


def over_memory(plan: Plan) -> str:
    """Return which rank is predicted to need more memory than its device has, or nothing."""
    for rank, (need, limit) in enumerate(zip(plan.prediction.memory_bytes, memory_limits(plan), strict=True)):
        if 0 < limit < need:
            return f"rank {rank} needs {need} bytes of memory, its device has {limit}"
    return ""


def _can_simulate(plan: Plan) -> bool:
    minibatches = steady_minibatches(plan.schedule, topology_of(plan))
    return minibatches * plan.schedule.microbatches * len(plan.stages) <= _MOST_STEPS
