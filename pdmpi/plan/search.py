"""The partitioner: an exact dynamic program over cuts and devices.

What is optimal over what
    All chains of nested cuts of `pdmpi.plan.cuts` (all of the graph's cuts when it has few,
    otherwise the prefixes of two execution orders and the cuts between layers in series), all
    replica counts, all numbers of devices used from the first device on, and all numbers of
    copies of the pipeline that divide the cluster evenly.  Stages take consecutive devices
    in pipeline order without a gap; a stage may begin and end anywhere in a machine.  The
    objective is the steady period of `pdmpi.plan.predict`, the largest stage period.

Recurrence
    With A(I, d, l) the smallest largest period of any way to run the layers before cut I on
    devices 0..d-1 such that what crosses I is priced at level l,

        A(J, e, l') = min over I inside J, d < e, l of
                      max(A(I, d, l), period(I, J, devices d..e-1, entering at l, leaving at l'))

    where a stage on devices d..e-1 may enter at l only if l is at least the level that
    separates devices d and e-1, and leave at l' only if l' is at least the level that
    separates d and e: the two ends then agree on the slowest link between the stages.
    PipeDream's recurrence (Narayanan et al. 2019, section 3.1) solves each level apart and
    treats its plan as one indivisible worker of the next, so that a stage cannot span part
    of a machine; this one sees all levels at once.  With memory limits the number of devices
    behind d matters (the in-flight depth), so that the program is solved for each number of
    devices in use.

Speed
    Cuts are sorted by the compute before them.  Given a period that some plan reaches, the
    cuts that can lie at device d have between (total - what the devices from d on can do) and
    (what those before d can do), which leaves few when the plan is near balance.  A first
    pass over a few well-placed cuts finds such a period, the second is exact.

Ties
    Fewest stages, then fewest devices, then (from the last stage backwards) fewest replicas
    and the earliest cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pdmpi.plan.pricing import Found, FoundStage, Pricer, Problem, largest

__all__ = ["search"]

_TIE = 1e-12
_FEW_CUTS = 48

Level = int | None
Key = tuple[int, Level]
"""Devices taken, and the level at which the boundary there is priced (None at the start)."""


def search(problem: Problem, bound_s: float = np.inf) -> Found | None:
    """Return the partition with the smallest period that is at most ``bound_s``, or None.

    Parameters
    ----------
    problem
        What to partition.
    bound_s
        A period that is known to be reached otherwise; a tight one makes the search fast.
    """
    few = _few_cuts(problem)
    if few is not None:
        rough = _solve(few, bound_s)
        bound_s = min(bound_s, rough.period_s) if rough else bound_s
    return _solve(problem, bound_s * (1 + _TIE))


def _few_cuts(problem: Problem) -> Problem | None:
    """Return the same problem with a few cuts that carry little, spread evenly over the compute."""
    cuts = problem.cuts
    if len(cuts) <= 2 * _FEW_CUTS:
        return None
    seconds = cuts.forward_s + cuts.backward_s
    edges = np.searchsorted(seconds, np.linspace(0, seconds[-1], _FEW_CUTS + 1)[1:-1])
    bins = [part for part in np.split(np.arange(1, len(cuts) - 1), np.unique(edges)) if len(part)]
    chosen = [0, *(int(part[cuts.sent_bytes[part].argmin()]) for part in bins), len(cuts) - 1]
    return replace(problem, cuts=cuts.subset(sorted(set(chosen))))


def _solve(problem: Problem, bound_s: float) -> Found | None:
    free = replace(
        problem, limit_memory=False, recompute="never" if problem.recompute == "auto" else problem.recompute
    )
    found = _Table(free, sum(problem.shape) or problem.devices, exact_end=False).solve(bound_s)
    if found is None or not problem.memory_limited or fits(problem, found):
        return found
    least_s, best = found.period_s, None
    for in_use in (sum(problem.shape),) if problem.shape else range(problem.devices, 0, -1):
        found = _Table(problem, in_use, exact_end=True).solve(bound_s)
        if found and (best is None or _rank(found, best)):
            best, bound_s = found, found.period_s * (1 + _TIE)
    assert best is None or best.period_s >= least_s * (1 - 1e-9)
    return best


def fits(problem: Problem, found: Found) -> bool:
    """Return whether every stage of a partition fits the memory without recomputation."""
    pricer = Pricer(problem, found.stages[-1].first + found.stages[-1].replicas)
    return all(
        np.isfinite(
            pricer.periods(
                s.first, s.replicas, slice(s.inner, s.inner + 1), slice(s.outer, s.outer + 1),
                s is found.stages[-1],
            )
        ).all()
        and not pricer.recomputes(s.first, s.replicas, s.inner, s.outer, s is found.stages[-1])
        for s in found.stages
    )  # fmt: skip


def _rank(a: Found, b: Found) -> bool:
    """Return whether partition ``a`` comes before ``b``."""
    if abs(a.period_s - b.period_s) > _TIE * b.period_s:
        return a.period_s < b.period_s
    return (len(a.stages), a.stages[-1].first + a.stages[-1].replicas) < (
        len(b.stages),
        b.stages[-1].first + b.stages[-1].replicas,
    )


@dataclass(frozen=True, slots=True)
class _Move:
    """A stage from device ``first`` on, entering at a level and leaving at another."""

    first: int
    count: int
    entering: Level
    leaving: Level


class _Table:
    """The dynamic program for a number of devices in use, or for any up to it."""

    def __init__(self, problem: Problem, in_use: int, *, exact_end: bool) -> None:
        self.problem = problem
        self.in_use = in_use
        self.exact_end = exact_end
        self.pricer = Pricer(problem, in_use)
        self.last = len(problem.cuts) - 1
        self.seconds = problem.cuts.forward_s + problem.cuts.backward_s
        speeds = [problem.cluster.device(d).relative_speed for d in range(problem.cluster.num_devices)]
        part = problem.copies * problem.devices
        per_device = np.array(speeds[:part]).reshape(problem.copies, -1).sum(axis=0)[:in_use]
        self.reach = np.concatenate([[0.0], np.cumsum(per_device)])

    def solve(self, bound_s: float) -> Found | None:
        """Return the best partition whose period is at most ``bound_s``."""
        windows = self._windows(bound_s)
        best = self._sweep(windows, bound_s, count_stages=False)
        ends = [best[e, None][-1] for e in self._ends() if (e, None) in best]
        period_s = min(ends, default=np.inf)
        if not np.isfinite(period_s):
            return None
        limit = period_s * (1 + _TIE)
        windows = self._windows(limit)
        counts = self._sweep(windows, limit, count_stages=True)
        end = min(self._ends(), key=lambda e: (counts[e, None][-1] if (e, None) in counts else np.inf, e))
        return Found(self._trace(windows, counts, limit, end), self.problem.copies, float(period_s))

    def _ends(self) -> range:
        if self.problem.shape:
            return range(sum(self.problem.shape), sum(self.problem.shape) + 1)
        return range(self.in_use if self.exact_end else 1, self.in_use + 1)

    def _windows(self, bound_s: float) -> list[slice]:
        """Return, for each number of devices taken, the cuts that may lie there."""
        found = [slice(0, 1)]
        for taken in self.reach[1:]:
            if np.isfinite(bound_s):
                most = bound_s * taken * (1 + 1e-9)
                least = self.seconds[-1] - bound_s * (self.reach[-1] - taken) * (1 + 1e-9)
                low = int(np.searchsorted(self.seconds, least * (1 - 1e-9), "left"))
                high = int(np.searchsorted(self.seconds, most, "right"))
                found.append(slice(max(low, 1), max(high, low, 1)))
            else:
                found.append(slice(1, self.last + 1))
        return found

    def _stages_before(self, e: int) -> Iterator[tuple[int, int]]:
        """Yield (first device, replicas) of every stage that may end before device ``e``."""
        if self.problem.shape:
            ends = list(itertools.accumulate(self.problem.shape, initial=0))
            return ((a, b - a) for a, b in itertools.pairwise(ends) if b == e)
        counts: Sequence[int] = self.problem.replica_counts or range(1, self.problem.devices + 1)
        return ((e - m, m) for m in counts if m <= e)

    def _levels(self, d: int) -> tuple[int, ...]:
        """Return the levels at which a boundary before device ``d`` can be priced."""
        if d >= self.in_use:
            return ()
        return tuple(range(self.problem.links.level(d - 1, d), self.problem.levels))

    def _entering(self, d: int, e: int) -> tuple[Level, ...]:
        if d == 0:
            return (None,)
        span = self.problem.links.level(d, e - 1)
        return tuple(level for level in self._levels(d) if level >= span)

    def _leaving(self, d: int, e: int) -> tuple[int, ...]:
        if e >= self.in_use:
            return ()
        span = self.problem.links.level(d, e)
        return tuple(level for level in self._levels(e) if level >= span)

    def _sweep(
        self, windows: list[slice], limit: float, *, count_stages: bool
    ) -> dict[Key, NDArray[np.float64]]:
        """Return, for every reachable state, the smallest period or the fewest stages, over its window.

        States that end the pipeline have level None and hold the whole graph only.
        """
        table: dict[Key, NDArray[np.float64]] = {(0, None): np.zeros(1)}
        whole = slice(self.last, self.last + 1)
        for e in range(1, self.in_use + 1):
            for d, m in self._stages_before(e):
                for entering in self._entering(d, e):
                    before = table.get((d, entering))
                    if before is None:
                        continue
                    if windows[e].stop > windows[e].start:
                        self._relax(
                            table, windows[d], before, windows[e], d, m, entering, self._leaving(d, e),
                            limit, count_stages,
                        )  # fmt: skip
                    if e in self._ends():
                        self._relax(
                            table, windows[d], before, whole, d, m, entering, (None,), limit, count_stages
                        )
        return table

    def _relax(
        self, table: dict[Key, NDArray[np.float64]], inner: slice, before: NDArray[np.float64], outer: slice,
        d: int, m: int, entering: Level, leaving: Sequence[Level], limit: float, count_stages: bool,
    ) -> None:  # fmt: skip
        """Improve the states behind a stage on devices d..d+m-1, for each level at which it may leave."""
        if not leaving:
            return
        rows = np.flatnonzero(np.isfinite(before))
        if not len(rows):
            return
        low, high = int(rows[0]), int(rows[-1]) + 1
        inner = slice(inner.start + low, inner.start + high)
        before = before[low:high]
        work = self.pricer.periods(d, m, inner, outer, leaving == (None,))
        np.maximum(work, self.problem.cuts.gaps[inner, outer], out=work)
        for level in leaving:
            periods = largest(self.pricer.transfer(d, m, entering, level), inner, outer, work)
            if count_stages:
                now = np.where(periods <= limit, before[:, None] + 1.0, np.inf).min(axis=0)
            else:
                now = np.maximum(periods, before[:, None]).min(axis=0)
                now[now > limit] = np.inf
            key = (d + m, level)
            if key in table:
                np.minimum(table[key], now, out=table[key])
            elif np.isfinite(now).any():
                table[key] = now

    def _trace(
        self, windows: list[slice], counts: dict[Key, NDArray[np.float64]], limit: float, end: int
    ) -> tuple[FoundStage, ...]:
        """Return the stages of the first partition, in the order of ties, that meets the limit."""
        stages: list[FoundStage] = []
        e, outer, leaving, left = end, self.last, None, counts[end, None][-1]
        while e:
            e, outer, leaving, left = self._step_back(windows, counts, limit, e, outer, leaving, left, stages)
        return tuple(reversed(stages))

    def _step_back(
        self, windows: list[slice], counts: dict[Key, NDArray[np.float64]], limit: float, e: int, outer: int,
        leaving: Level, left: float, stages: list[FoundStage],
    ) -> tuple[int, int, Level, float]:  # fmt: skip
        column = slice(outer, outer + 1)
        for d, m in self._stages_before(e):
            if leaving is not None and leaving not in self._leaving(d, e):
                continue
            for entering in self._entering(d, e):
                before = counts.get((d, entering))
                if before is None:
                    continue
                work = self.pricer.periods(d, m, windows[d], column, leaving is None)
                np.maximum(work, self.problem.cuts.gaps[windows[d], column], out=work)
                periods = largest(self.pricer.transfer(d, m, entering, leaving), windows[d], column, work)
                rows = np.flatnonzero((periods[:, 0] <= limit) & (before == left - 1.0))
                if len(rows):
                    inner = windows[d].start + int(rows[0])
                    again = self.pricer.recomputes(d, m, inner, outer, leaving is None)
                    stages.append(FoundStage(inner, outer, d, m, again))
                    return d, inner, entering, left - 1.0
        raise AssertionError("a state that was reached has no way back")
