"""The partitioner: an exact dynamic program over cuts and devices.

What is optimal over what
    All chains of nested cuts of `pdmpi.plan.cuts` (all of the graph's cuts when it has few,
    otherwise the prefixes of two execution orders and the cuts between layers in series), all
    replica counts, all numbers of devices used from the first one on, and all numbers of
    copies of the pipeline that divide the cluster evenly.  Stages take consecutive devices
    in pipeline order without a gap; a stage may begin and end anywhere in a machine.  The
    objective is the steady period of `pdmpi.plan.predict`, the largest stage period.
    Beyond `MANY` devices a stage that is not inside one member of a level (a node) takes whole
    ones.

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
    pass over a few well-placed cuts finds such a period, the second is exact.  Memory is
    left aside at first: a partition that fits without having been limited is the best.

Ties
    Fewest stages, then fewest devices, then (from the last stage backwards) fewest replicas
    and the earliest cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pdmpi.plan.pricing import Found, FoundStage, Pricer, Problem, with_transfers

__all__ = ["MANY", "by_stages", "search", "smallest_memory"]

MANY = 64
"""Devices of one copy up to which every replica count and every first device is tried."""

_TIE = 1e-12
_FEW_CUTS = 48

Level = int | None
Key = tuple[int, Level, int]
"""Devices taken, the level at which the boundary there is priced (None at the ends), stages so far.

The stages so far are 0 where they are not told apart.
"""

Floats = NDArray[np.float64]


def search(problems: Sequence[Problem]) -> tuple[Problem, Found] | None:
    """Return the best partition of all problems and the problem that it solves, or None if nothing fits.

    The problems are variants of one: other copies, other devices.  Among equals the one with
    fewest stages, then the first, is returned.
    """
    bound_s, rough = math.inf, []
    for index, problem in reversed(list(enumerate(problems))):
        few = _few_cuts(problem)
        found = _solve(few, bound_s) if few is not None else None
        bound_s = min(bound_s, found.period_s * (1 + _TIE)) if found else bound_s
        rough.append((found.period_s if found else math.inf, index))
    best: tuple[Problem, Found] | None = None
    place = len(problems)
    for _, index in sorted(rough):
        found = _solve(problems[index], bound_s)
        if found is None:
            continue
        bound_s = min(bound_s, found.period_s * (1 + _TIE))
        if best is None or _precedes(found, best[1]) or (index < place and not _precedes(best[1], found)):
            best, place = (problems[index], found), index
    return best


def by_stages(problem: Problem, most: int, bound_s: float = math.inf) -> list[Found]:
    """Return, for each number of stages up to ``most``, the partition with the smallest period in the bound.

    Numbers of stages for which nothing fits are left out.
    """
    in_uses = range(problem.positions, 0, -1) if problem.memory_limited else [problem.positions]
    best: dict[int, Found] = {}
    for in_use in in_uses:
        table = _Table(problem, in_use, exact_end=problem.memory_limited)
        for count, found in table.solve_each(most, bound_s).items():
            if count not in best or _precedes(found, best[count]):
                best[count] = found
    return [best[count] for count in sorted(best)]


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
        problem,
        limit_memory=False,
        recompute="never" if problem.recompute == "auto" else problem.recompute,
    )
    found = _Table(free, sum(problem.shape) or problem.positions, exact_end=False).solve(bound_s)
    if found is None or not problem.memory_limited or _fits(problem, found):
        return found
    least_s, best = found.period_s, None
    for in_use in (sum(problem.shape),) if problem.shape else range(problem.positions, 0, -1):
        found = _Table(problem, in_use, exact_end=True).solve(bound_s)
        if found and (best is None or _precedes(found, best)):
            best, bound_s = found, found.period_s * (1 + _TIE)
    assert best is None or best.period_s >= least_s * (1 - 1e-9)
    return best


def _fits(problem: Problem, found: Found) -> bool:
    """Return whether every stage of a partition fits the memory as it is."""
    last = found.stages[-1]
    pricer = Pricer(replace(problem, recompute="never"), last.first + last.replicas)
    for s in found.stages:
        inner, outer = slice(s.inner, s.inner + 1), slice(s.outer, s.outer + 1)
        limits = [m for m in problem.memory_bytes[s.first : s.first + s.replicas] if m]
        if limits and pricer.used_bytes(s.first, s.replicas, inner, outer, s.recompute)[0, 0] > min(limits):
            return False
    return True


def smallest_memory(problem: Problem) -> tuple[Problem, Found]:
    """Return the partition whose fullest device needs least memory, in bytes in place of its period."""
    few = replace(_few_cuts(problem) or problem, limit_memory=False, objective="memory")
    best: Found | None = None
    for in_use in (sum(problem.shape),) if problem.shape else range(few.positions, 0, -1):
        found = _Table(few, in_use, exact_end=True).solve(math.inf)
        if found and (best is None or found.period_s < best.period_s):
            best = found
    assert best is not None
    return few, best


def _precedes(a: Found, b: Found) -> bool:
    """Return whether partition ``a`` comes before ``b``."""
    if abs(a.period_s - b.period_s) > _TIE * b.period_s:
        return a.period_s < b.period_s
    return (len(a.stages), a.num_devices) < (len(b.stages), b.num_devices)


class _Table:
    """The dynamic program for a number of devices in use, or for any up to it."""

    def __init__(self, problem: Problem, in_use: int, *, exact_end: bool) -> None:
        self.problem = problem
        self.in_use = in_use
        self.pricer = Pricer(problem, in_use)
        self.last = len(problem.cuts) - 1
        self.seconds = problem.cuts.forward_s + problem.cuts.backward_s
        speeds = [problem.cluster.device(d).relative_speed for d in problem.device_of]
        in_copies = np.array(speeds[: problem.copies * problem.positions]).reshape(problem.copies, -1)
        self.reach = np.concatenate([[0.0], np.cumsum(in_copies.sum(axis=0)[:in_use])])
        fixed = exact_end or bool(problem.shape)
        self.ends = range(in_use if fixed else 1, in_use + 1)

    def solve(self, bound_s: float) -> Found | None:
        """Return the best partition whose period is at most ``bound_s``."""
        if bound_s * self.reach[-1] * (1 + 1e-9) < self.seconds[-1]:
            return None
        best = self._sweep(bound_s)
        period_s = min((float(best[end][-1]) for end in self._final(best, 0)), default=math.inf)
        if not math.isfinite(period_s):
            return None
        limit = period_s * (1 + _TIE)
        counts = self._sweep(limit, count_stages=True)
        end = min(self._final(counts, 0), key=lambda key: (counts[key][-1], key[0]))
        return Found(self._trace(counts, limit, end, float(counts[end][-1])), self.problem.copies, period_s)

    def solve_each(self, most: int, bound_s: float) -> dict[int, Found]:
        """Return the best partition of each number of stages up to ``most`` that there is."""
        table = self._sweep(bound_s, most=most)
        found = {}
        for count in range(1, most + 1):
            ends = [key for key in self._final(table, count) if math.isfinite(table[key][-1])]
            if ends:
                end = min(ends, key=lambda key: (table[key][-1], key[0]))
                limit = float(table[end][-1]) * (1 + _TIE)
                stages = self._trace(table, limit, end, 0.0)
                found[count] = Found(stages, self.problem.copies, float(table[end][-1]))
        return found

    def _final(self, table: dict[Key, Floats], stages: int) -> list[Key]:
        return [(e, None, stages) for e in self.ends if (e, None, stages) in table]

    def _window(self, taken: int, bound_s: float) -> slice:
        """Return the cuts that may lie behind a number of devices."""
        if taken == 0:
            return slice(0, 1)
        if not math.isfinite(bound_s):
            return slice(1, self.last + 1)
        most = bound_s * self.reach[taken] * (1 + 1e-9)
        least = self.seconds[-1] - bound_s * (self.reach[-1] - self.reach[taken]) * (1 + 1e-9)
        low = int(np.searchsorted(self.seconds, least * (1 - 1e-9), "left"))
        high = int(np.searchsorted(self.seconds, most, "right"))
        return slice(max(low, 1), max(high, low, 1))

    @cached_property
    def _unit(self) -> int:
        """Devices that a stage takes whole when it is not inside one such unit; 1 up to `MANY` devices."""
        if self.problem.positions <= MANY:
            return 1
        sizes = [s for s in self.problem.links.member_sizes[1:] if s < self.problem.positions]
        few = [s for s in (*sizes, math.isqrt(self.problem.positions)) if self.problem.positions // s <= MANY]
        return min(few, key=lambda s: (self.problem.positions / s) ** 2 + self.problem.positions * s)

    def _stages_before(self, e: int) -> Iterator[tuple[int, int]]:
        """Yield (first device, replicas) of every stage that may end before device ``e``."""
        if self.problem.shape:
            ends = itertools.accumulate(self.problem.shape, initial=0)
            yield from ((a, b - a) for a, b in itertools.pairwise(ends) if b == e)
        elif self.problem.terms.single_stage:
            yield (0, e)
        else:
            yield from ((d, m) for d, m in self._runs_before(e) if self.problem.allows(m))

    def _runs_before(self, e: int) -> Iterator[tuple[int, int]]:
        start = (e - 1) // self._unit * self._unit
        yield from ((e - m, m) for m in range(1, e - start + 1))
        if e % self._unit == 0 or e == self.in_use:
            yield from ((d, e - d) for d in range(start - self._unit, -1, -self._unit))

    def _levels(self, d: int) -> range:
        """Return the levels at which a boundary before device ``d`` can be priced."""
        return range(self.problem.level(d - 1, d), self.problem.levels)

    def _entering(self, d: int, e: int) -> Sequence[Level]:
        if d == 0:
            return (None,)
        span = self.problem.level(d, e - 1)
        return [level for level in self._levels(d) if level >= span]

    def _leaving(self, d: int, e: int) -> Sequence[Level]:
        if e >= self.in_use or self.problem.terms.single_stage:
            return ()
        span = self.problem.level(d, e)
        return [level for level in self._levels(e) if level >= span]

    def _sweep(self, limit: float, *, count_stages: bool = False, most: int = 0) -> dict[Key, Floats]:
        """Return, for every reachable state, the smallest period or the fewest stages, over its window.

        States that end the pipeline have level None and hold the whole graph only.  With
        ``most``, states are told apart by their number of stages, up to that.
        """
        windows = [self._window(taken, limit) for taken in range(self.in_use + 1)]
        self.windows = windows
        table: dict[Key, Floats] = {(0, None, 0): np.zeros(1)}
        steps = [(k, k + 1) for k in range(most)] or [(0, 0)]
        reached = {0: slice(0, 1)}
        whole = slice(self.last, self.last + 1)
        for e in range(1, self.in_use + 1):
            for (d, m), (k, more) in itertools.product(list(self._stages_before(e)), steps):
                levels = self._entering(d, e)
                before = {level: table[d, level, k] for level in levels if (d, level, k) in table}
                if not before or reached[d].start == reached[d].stop:
                    continue
                cases = [(windows[e], self._leaving(d, e))]
                if e in self.ends:
                    cases.append((whole, (None,)))
                for outer, leaving in cases:
                    inner, outer = self._narrowed(windows[d], outer, reached[d], d, e, limit)
                    if leaving and inner.stop > inner.start and outer.stop > outer.start:
                        self._relax(table, inner, outer, before, d, m, leaving, more, limit, count_stages)
            keys = itertools.product((e,), range(self.problem.levels), {more for _, more in steps})
            states = [table[key] for key in keys if key in table]
            finite = np.flatnonzero(np.isfinite(np.minimum.reduce(states or [np.array([np.inf])])))
            reached[e] = slice(int(finite[0]), int(finite[-1]) + 1) if len(finite) else slice(0, 0)
        return table

    def _narrowed(
        self, inner: slice, outer: slice, rows: slice, d: int, e: int, limit: float
    ) -> tuple[slice, slice]:
        """Leave out cuts before which nothing ends, and those too far apart for the devices between them."""
        low, high = inner.start + rows.start, inner.start + rows.stop
        if math.isfinite(limit):
            span = limit * (self.reach[e] - self.reach[d]) * (1 + 1e-9)
            slack = 1e-9 * self.seconds[-1]
            first = self.seconds[min(outer.start, self.last)] - span - slack
            low = max(low, int(np.searchsorted(self.seconds, first, "left")))
            if low < high:
                most = self.seconds[high - 1] + span + slack
                stop = min(outer.stop, int(np.searchsorted(self.seconds, most, "right")))
                outer = slice(outer.start, max(stop, outer.start))
        return slice(low, high), outer

    def _relax(
        self, table: dict[Key, Floats], inner: slice, outer: slice, before: dict[Level, Floats], d: int,
        m: int, leaving: Sequence[Level], stages: int, limit: float, count_stages: bool,
    ) -> None:  # fmt: skip
        """Improve the states behind a stage on devices d..d+m-1, for each level at which it may leave."""
        work = self.pricer.periods(d, m, inner, outer, leaving == (None,))
        np.maximum(work, self.problem.cuts.gaps[inner, outer], out=work)
        offset = self.windows[d].start
        target = slice(self.last, self.last + 1) if leaving == (None,) else self.windows[d + m]
        part = slice(outer.start - target.start, outer.stop - target.start)
        ports = self.problem.ports(d, m)
        behind = [(level, self.pricer.transfer(ports, level, outer)) for level in leaving]
        for entering, values in before.items():
            own = values[inner.start - offset : inner.stop - offset, None]
            entered = self.pricer.transfer(ports, entering, inner)
            for level, left in behind:
                periods = with_transfers(work, entered, left)
                if count_stages:
                    now = np.where(periods <= limit, own + 1.0, np.inf).min(axis=0)
                else:
                    now = np.maximum(periods, own).min(axis=0)
                    now[now > limit] = np.inf
                key = (d + m, level, stages)
                if key not in table:
                    table[key] = np.full(target.stop - target.start, np.inf)
                np.minimum(table[key][part], now, out=table[key][part])

    def _trace(
        self, table: dict[Key, Floats], limit: float, end: Key, count: float
    ) -> tuple[FoundStage, ...]:
        """Return the stages of the first partition, in the order of ties, that meets the limit.

        ``table`` holds stage counts, of which ``count`` is the end's, or, where states are told
        apart by their stages, periods.
        """
        stages: list[FoundStage] = []
        key, outer = end, self.last
        while key[0]:
            count -= 1.0
            key, stage = self._step_back(table, limit, key, outer, count)
            stages.append(stage)
            outer = stage.inner
        return tuple(reversed(stages))

    def _step_back(
        self, table: dict[Key, Floats], limit: float, key: Key, outer: int, count: float
    ) -> tuple[Key, FoundStage]:
        """Return the state before a state, and the stage between them."""
        e, leaving, stages = key
        column = slice(outer, outer + 1)
        for d, m in self._stages_before(e):
            if leaving is not None and leaving not in self._leaving(d, e):
                continue
            inner, ports = self.windows[d], self.problem.ports(d, m)
            for entering in self._entering(d, e):
                before = (d, entering, max(stages - 1, 0))
                if before not in table:
                    continue
                work = self.pricer.periods(d, m, inner, column, leaving is None)
                np.maximum(work, self.problem.cuts.gaps[inner, column], out=work)
                entered = self.pricer.transfer(ports, entering, inner)
                periods = with_transfers(work, entered, self.pricer.transfer(ports, leaving, column))
                reached = table[before] <= limit if stages else table[before] == count
                rows = np.flatnonzero((periods[:, 0] <= limit) & reached)
                if len(rows):
                    cut = inner.start + int(rows[0])
                    again = self.pricer.recomputes(d, m, cut, outer, leaving is None)
                    return before, FoundStage(cut, outer, d, m, again)
        raise AssertionError("a state that was reached has no way back")
