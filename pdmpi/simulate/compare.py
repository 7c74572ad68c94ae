"""``--schedule auto``: candidate plans of several schedules, simulated, compared, and one chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdmpi.errors import InputError
from pdmpi.plan.plan import Plan
from pdmpi.plan.terms import terms_of
from pdmpi.simulate.forecast import Forecast, forecast, memory_limits

__all__ = ["Candidate", "Comparison", "compare"]

_AS_GOOD = 0.02
"""Schedules whose throughputs differ by less than this share are taken as equally fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One schedule with the plan made for it.

    Attributes
    ----------
    schedule
        Its name.
    samples_per_s
        In the steady state; 0 where it cannot be used.
    utilisation
        Mean busy fraction of the ranks.
    memory_bytes, memory_limit_bytes
        Peak of the rank with the least memory to spare, and what its device has (0: unknown).
    in_flight
        Most microbatches in flight on any rank.
    stale
        Whether gradients are taken at older weights than they are applied to.
    usable
        Whether it can be used.
    note
        Why it cannot be used; empty otherwise.
    """

    schedule: str
    samples_per_s: float = 0.0
    utilisation: float = 0.0
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    in_flight: int = 0
    stale: bool = False
    usable: bool = True
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Candidates, the usable ones first, by throughput; and the choice.

    Attributes
    ----------
    candidates
        All of them.
    chosen
        Name of the chosen schedule.
    why
        One sentence for people.
    """

    candidates: tuple[Candidate, ...]
    chosen: str
    why: str


def compare(plans: Mapping[str, Plan | str]) -> Comparison:
    """Simulate a plan for each schedule and choose one.

    The fastest that fits the devices' memory is chosen; of those about as fast (within 2 %),
    one without stale weights before one with them, then the one that needs less memory.

    Parameters
    ----------
    plans
        By schedule, its plan, or why there is none.  Plans of schedules that do not flush should
        come with the depth that `auto_depth` chose, or replicated stages may look slow.

    Raises
    ------
    InputError
        When no schedule can be used; the message says why for each.
    """
    found = [_candidate(name, plan) for name, plan in plans.items()]
    ranked = tuple(sorted(found, key=lambda c: (not c.usable, -c.samples_per_s)))
    usable = [c for c in ranked if c.usable]
    if not usable:
        reasons = "; ".join(f"{c.schedule}: {c.note}" for c in ranked)
        raise InputError(f"no schedule can be used: {reasons}")
    fastest = usable[0].samples_per_s
    near = [c for c in usable if c.samples_per_s >= fastest * (1 - _AS_GOOD)]
    chosen = min(near, key=lambda c: (c.stale, c.memory_bytes, -c.samples_per_s))
    return Comparison(candidates=ranked, chosen=chosen.schedule, why=_why(chosen, near, ranked))


def _candidate(name: str, plan: Plan | str) -> Candidate:
    if isinstance(plan, str):
        return Candidate(schedule=name, usable=False, note=plan)
    try:
        found = forecast(plan)
    except InputError as error:
        return Candidate(schedule=name, usable=False, note=str(error))
    rank, limit = _tightest(plan, found)
    report = found.report
    need = report.ranks[rank].memory_bytes
    fits = not limit or need <= limit
    return Candidate(
        schedule=name,
        samples_per_s=report.samples_per_s,
        utilisation=sum(r.utilisation for r in report.ranks) / len(report.ranks),
        memory_bytes=need,
        memory_limit_bytes=limit,
        in_flight=max(r.in_flight for r in report.ranks),
        stale=not terms_of(plan.schedule).flushes and len(plan.stages) > 1,
        usable=fits,
        note="" if fits else f"rank {rank} needs {need} bytes of memory, its device has {limit}",
    )


def _tightest(plan: Plan, found: Forecast) -> tuple[int, int]:
    """Return the rank with the least memory to spare and its device's memory."""
    limits = memory_limits(plan)
    needs = [rank.memory_bytes for rank in found.report.ranks]
    rank = max(range(len(needs)), key=lambda r: needs[r] / limits[r] if limits[r] else needs[r])
    return rank, limits[rank]


def _why(chosen: Candidate, near: list[Candidate], ranked: tuple[Candidate, ...]) -> str:
    parts = [
        f"{chosen.schedule}: {chosen.samples_per_s:.4g} samples/s, {100 * chosen.utilisation:.0f} % busy"
    ]
    others = [c for c in near if c is not chosen]
    slower = [c for c in ranked if c.usable and c not in near]
    if others:
        names = ", ".join(c.schedule for c in others)
        fresh = not chosen.stale and any(c.stale for c in others)
        reason = "without stale weights" if fresh else "with less memory"
        parts.append(f"about as fast as {names}, but {reason}")
    if slower:
        ratio = chosen.samples_per_s / slower[0].samples_per_s
        parts.append(f"{ratio:.2f} times the throughput of {slower[0].schedule}, the next")
    out = [c.schedule for c in ranked if not c.usable]
    if out:
        parts.append(f"not usable: {', '.join(out)}")
    return "; ".join(parts)
