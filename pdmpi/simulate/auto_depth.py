"""``extra_in_flight = "auto"``: as few minibatches in flight as keep the bottleneck busy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdmpi.errors import InputError
from pdmpi.plan.plan import Plan
from pdmpi.plan.terms import terms_of
from pdmpi.schedule.topology import topology_of
from pdmpi.simulate.forecast import Forecast, forecast, memory_limits

__all__ = ["DepthChoice", "auto_depth"]

_TOLERANCE = 0.01
"""Share of the period that one more minibatch in flight must save to be worth its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthChoice:
    """The depth that was chosen, and what was tried.

    Attributes
    ----------
    extra_in_flight
        The fewest extra minibatches that suffice.
    period_s
        Seconds a microbatch that they give.
    busy_s
        Seconds a microbatch that the busiest rank works: no depth can give less.
    tried
        Period of every number of extra minibatches that was simulated, from 0 on.
    """

    extra_in_flight: int
    period_s: float
    busy_s: float
    tried: tuple[float, ...]


def auto_depth(plan: Plan, limit: int | None = None) -> DepthChoice:
    """Choose the extra minibatches in flight of a plan by simulation, transfers counted.

    More are tried until the busiest rank has no idle time left, or as many in a row as the
    pipeline has stages (one for each boundary, and one) have not helped; then the fewest
    within 1 % of the best are taken.

    Parameters
    ----------
    plan
        The plan; its own ``extra_in_flight`` does not matter.
    limit
        Most extra minibatches to try; as many as the pipeline has ranks by default, at least 4.

    Raises
    ------
    InputError
        When the schedule does not take the plan's shape.
    """
    most = max(4, topology_of(plan).num_ranks) if limit is None else limit
    patience = len(plan.stages)
    found = forecast(_with(plan, 0))
    busy = _busy_s(found)
    tried = [found.report.period_s]
    if not terms_of(plan.schedule).flushes and len(plan.stages) > 1:
        while len(tried) <= most and tried[-1] > busy * (1 + _TOLERANCE):
            if len(tried) > patience and min(tried[-patience:]) >= min(tried[:-patience]) * (1 - _TOLERANCE):
                break
            try:
                found = forecast(_with(plan, len(tried)))
            except InputError:  # 2BW accumulates at least as many microbatches as are in flight
                break
            if not _fits(plan, found):
                break
            tried.append(found.report.period_s)
    best = min(tried)
    extra = next(i for i, period in enumerate(tried) if period <= best * (1 + _TOLERANCE))
    return DepthChoice(extra_in_flight=extra, period_s=tried[extra], busy_s=busy, tried=tuple(tried))


def _with(plan: Plan, extra: int) -> Plan:
    return replace(plan, schedule=replace(plan.schedule, extra_in_flight=extra))


def _busy_s(found: Forecast) -> float:
    return max(rank.busy_s for rank in found.report.ranks) / found.report.num_microbatches


def _fits(plan: Plan, found: Forecast) -> bool:
    """Return whether every rank's memory suffices, where it is known."""
    return all(
        not limit or rank.memory_bytes <= limit
        for limit, rank in zip(memory_limits(plan), found.report.ranks, strict=True)
    )
