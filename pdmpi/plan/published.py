"""PipeDream's own cost models and its level-by-level dynamic program (Narayanan et al. 2019, section 3.1).

Two models, for comparison with what was published; plans for use are made by
`pdmpi.plan.search`.  T, P and a are the compute seconds, parameter bytes and bytes behind a
cut; B is a level's bandwidth, m the replicas, g the count of the level inside.

``pipedream2019-code``, as the published program has it:
    one stage on m of n:   (T + 4 (m - 1) / m P / B / g) / m
    a last stage on m:     (T + 4 (m - 1) / m P / B) / m          (no g)
    its transfers:         2 a / (B m), on both its sides, counted only on request
    memory, when limited:  ceil((n - used) / m) (activations + parameters) bytes
``pipedream2019``, the paper's text:
    a stage on m:          max(T, 2 (m - 1) / m P / B) / m        (ring allreduce, overlapped)
    a boundary:            2 a / B, whole

A(i, j, n), the best period of the layers between cuts i and j on the n members of a level, is
T(i, j) of the next level, so that a stage holds all members of a level inside it.  Unlike
the program, members may be left idle where that is faster, values with several readers are
counted once, and ties do not depend on hash order; its periods are met or undercut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pdmpi.errors import InputError, nearest
from pdmpi.graph.graph import INPUT
from pdmpi.plan.cluster import Cluster
from pdmpi.plan.cuts import Cuts, cuts_of
from pdmpi.plan.links import Links
from pdmpi.plan.plan import Plan, ScheduleChoice, StagePlan
from pdmpi.plan.predict import estimate, place
from pdmpi.plan.profile import Profile

__all__ = ["COST_MODELS", "Flags", "NestedStage", "published_partition", "published_plan"]

Floats = NDArray[np.float64]
COST_MODELS = ("pipedream2019-code", "pipedream2019")
_TIE = 1e-12
_MANY_CUTS = 500
_NO_BOUND = 1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """Options of the published program.

    Attributes
    ----------
    boundaries
        Whether boundary traffic counts (its activation compression ratio given as 1).
    straight
        Whether every stage has one replica.
    memory_bytes
        Limit of its memory rule; None for no limit.
    """

    boundaries: bool = True
    straight: bool = False
    memory_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class NestedStage:
    """Layers between two cuts on ``members`` members of a level, from member ``first`` on.

    ``inside`` is the plan of each member for the same layers, empty at the innermost level.
    """

    inner: int
    outer: int
    first: int
    members: int
    inside: tuple[NestedStage, ...] = ()


@dataclass(frozen=True)
class _LevelSolver:
    """One level: all pairs of cuts, or those from the empty cut on, on up to ``count`` members."""

    cuts: Cuts
    model: str
    flags: Flags
    count: int
    bandwidth: float
    inside_count: int
    seconds: Floats
    """Shape (cuts, cuts): seconds of a stage between two nested cuts on one member; infinite elsewhere."""
    all_pairs: bool
    bounds: Floats
    """Shape (cuts,): the largest period of use from each cut on."""
    nearest_end: Floats
    """Shape (cuts,): the least compute seconds before the end of a stage from each cut on."""

    @cached_property
    def parameters(self) -> Floats:
        """Parameter bytes between two cuts, shape (cuts, cuts)."""
        total = self.cuts.parameter_bytes
        return np.asarray(total[None, :] - total[:, None])

    @cached_property
    def sent(self) -> Floats:
        """Bytes behind each cut, inputs of the model not counted."""
        graph = self.cuts.profile.graph
        found: Floats = self.cuts.sent_bytes.copy()
        full = len(self.cuts) - 1
        for ref, names in graph.consumers.items():
            source = graph.index[ref.layer]
            if graph.layers[source].kind == INPUT:
                read = self.cuts.members[:full, [graph.index[name] for name in names]].min(axis=1)
                found[:full] -= (self.cuts.members[:full, source] & ~read) * graph.spec(ref).nbytes
        return found

    @cached_property
    def held_bytes(self) -> Floats:
        """Activation and parameter bytes between two cuts, shape (cuts, cuts)."""
        sizes = np.array(
            [
                0 if layer.kind == INPUT else cost.output_bytes
                for layer, cost in zip(self.cuts.profile.graph.layers, self.cuts.profile.costs, strict=True)
            ],
            dtype=float,
        )
        total: Floats = self.cuts.members.astype(float) @ sizes + self.cuts.parameter_bytes
        return np.asarray(total[None, :] - total[:, None])

    def stage(self, members: int, used: int, alone: bool) -> Floats:
        """Return the seconds of a stage on some members, the last of ``used``, shape (cuts, cuts)."""
        m, parameters = members, self.parameters
        if self.model == "pipedream2019":
            sync = 2 * (m - 1) / m / self.bandwidth
            found = self.seconds / m if m == 1 else np.maximum(self.seconds, sync * parameters) / m
        else:
            sync = 4 * (m - 1) / m / self.bandwidth / (self.inside_count if alone else 1)
            found = self.seconds / m if m == 1 else (self.seconds + sync * parameters) / m
        if self.flags.memory_bytes is not None:
            versions = -(-(self.count - used) // m)
            found = np.where(versions * self.held_bytes > self.flags.memory_bytes, np.inf, found)
        return np.asarray(found)

    def _extension(self, members: int, used: int) -> Floats:
        if self.flags.memory_bytes is None:
            return self._extensions[members]
        return self.extension(members, used)

    @cached_property
    def _extensions(self) -> dict[int, Floats]:
        """The last stages without a memory limit, for which the members used do not matter."""
        return {m: self.extension(m, m) for m in self._members}

    def extension(self, members: int, used: int) -> Floats:
        """Return the seconds of a last stage with its transfers, shape (cuts, cuts)."""
        found = self.stage(members, used, alone=False)
        if not self.flags.boundaries:
            return found
        share = 1 if self.model == "pipedream2019" else members
        moved = 2 * self.sent / (self.bandwidth * share)
        moved[-1] = 0.0
        found = np.maximum(found, moved[:, None])
        return found if self.model == "pipedream2019" else np.maximum(found, moved[None, :])

    @cached_property
    def _rows(self) -> int:
        return len(self.cuts) if self.all_pairs else 1

    @cached_property
    def _members(self) -> range:
        return range(1, 2 if self.flags.straight else self.count + 1)

    @cached_property
    def table(self) -> list[Floats]:
        """For each number of members used, from 0 on: periods, shape (rows, cuts)."""
        rows = self._rows
        found = [np.full((rows, len(self.cuts)), np.inf)]
        for used in range(1, self.count + 1):
            best = np.full((rows, len(self.cuts)), np.inf)
            if used in self._members:
                best = self.stage(used, used, alone=True)[:rows].copy()
            for m in self._members:
                if m < used:
                    _min_max(found[used - m], self._extension(m, used), best)
            self._prune(best, used)
            found.append(best)
        return found

    def _prune(self, periods: Floats, used: int) -> None:
        """Forget what is over the bound, or too far from any end for the members that are left."""
        rows = len(periods)
        bounds = self.bounds[:rows, None]
        before = self.cuts.forward_s + self.cuts.backward_s
        late = before[None, :] + bounds * (self.count - used) * (1 + 1e-9) < self.nearest_end[:rows, None]
        periods[(periods > bounds * (1 + 1e-9)) | late] = np.inf

    @cached_property
    def periods(self) -> Floats:
        """Smallest periods on up to ``count`` members, shape (rows, cuts)."""
        return np.asarray(np.minimum.reduce(self.table[1:]))

    def trace(self, inner: int, outer: int) -> list[NestedStage]:
        """Return the stages of the best plan between two cuts, its members' own plans left out."""
        limit = self.periods[inner, outer] * (1 + _TIE)
        used = max(u for u in range(1, self.count + 1) if self.table[u][inner, outer] <= limit)
        stages: list[NestedStage] = []
        while True:
            if used in self._members and self.stage(used, used, alone=True)[inner, outer] <= limit:
                stages.append(NestedStage(inner, outer, 0, used))
                return stages[::-1]
            cut, m = next(self._before(inner, outer, used, limit))
            stages.append(NestedStage(cut, outer, used - m, m))
            outer, used = cut, used - m

    def _before(self, inner: int, outer: int, used: int, limit: float) -> Iterator[tuple[int, int]]:
        for m in self._members:
            if m < used:
                ends = self._extension(m, used)[:, outer]
                yield from (
                    (int(cut), m)
                    for cut in np.flatnonzero(np.maximum(self.table[used - m][inner], ends) <= limit)
                )


def _min_max(first: Floats, last: Floats, best: Floats) -> None:
    """Lower ``best[i, j]`` to min over k of max(first[i, k], last[k, j]), the bottleneck product."""
    for k in np.flatnonzero(np.isfinite(first).any(axis=0)):
        rows = np.flatnonzero(np.isfinite(first[:, k]))
        columns = np.flatnonzero(np.isfinite(last[k]))
        if not len(columns):
            continue
        top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
        block = best[top:bottom, left:right]
        np.minimum(block, np.maximum(first[top:bottom, k, None], last[None, k, left:right]), out=block)


def published_partition(
    cuts: Cuts, cluster: Cluster, model: str, flags: Flags | None = None
) -> tuple[float, tuple[NestedStage, ...]]:
    """Return the period and the outermost level's stages of the best plan under a published model.

    Raises
    ------
    InputError
        The model is unknown, or no plan fits the memory.
    """
    if model not in COST_MODELS:
        raise InputError(f"cost model {model!r} is unknown{nearest(model, COST_MODELS)}")
    total = cuts.forward_s + cuts.backward_s
    bounds, nearest_end = _windows(cuts, cluster, model, flags or Flags())
    seconds = np.where(cuts.nested, total[None, :] - total[:, None], np.inf)
    solvers: list[_LevelSolver] = []
    for index, level in enumerate(cluster.levels):
        solver = _LevelSolver(
            cuts=cuts, model=model, flags=flags or Flags(), count=level.count,
            bandwidth=level.bandwidth_bytes_per_s,
            inside_count=cluster.levels[index - 1].count if index else 1,
            seconds=seconds, all_pairs=index < len(cluster.levels) - 1,
            bounds=bounds if index == 0 else np.full(len(cuts), _NO_BOUND), nearest_end=nearest_end,
        )  # fmt: skip
        solvers.append(solver)
        seconds = solver.periods
    period_s = float(seconds[0, -1])
    if not np.isfinite(period_s):
        raise InputError("no plan fits the memory under the published rule; allow more memory")
    return period_s, _nested(solvers, 0, len(cuts) - 1)


def _windows(cuts: Cuts, cluster: Cluster, model: str, flags: Flags) -> tuple[Floats, Floats]:
    """Return, for stages from each cut on, a bound on the inner level's period and their nearest end.

    Of use for many cuts on two levels: with U a period that a few of the cuts reach, a cut
    that lies between members a and a + 1 of the outer level has at most (outer count - a)
    members behind it, and compute between what the members before and behind can do in U.
    """
    free = np.full(len(cuts), _NO_BOUND), np.zeros(len(cuts))
    if len(cuts) < _MANY_CUTS or len(cluster.levels) != 2:
        return free
    few = cuts.subset([0, *range(1, len(cuts) - 1, len(cuts) * 2 // _MANY_CUTS), len(cuts) - 1])
    try:
        reached = published_partition(few, cluster, model, flags)[0] * (1 + 1e-9)
    except InputError:
        return free
    total = cuts.forward_s + cuts.backward_s
    inner, outer = (level.count for level in cluster.levels)
    least = np.ceil(total / (reached * inner) - 1e-9)
    most = np.floor(outer - (total[-1] - total) / (reached * inner) + 1e-9)
    bounds = np.where(least <= most, reached * (outer - least), -1.0)
    return bounds, total[-1] - reached * inner * (outer - least - 1)


def _nested(solvers: list[_LevelSolver], inner: int, outer: int) -> tuple[NestedStage, ...]:
    found = solvers[-1].trace(inner, outer)
    if len(solvers) == 1:
        return tuple(found)
    return tuple(
        NestedStage(s.inner, s.outer, s.first, s.members, _nested(solvers[:-1], s.inner, s.outer))
        for s in found
    )


def published_plan(profile: Profile, cluster: Cluster, model: str, flags: Flags | None = None) -> Plan:
    """Return the best plan under a published model; the predicted period is that model's.

    What the model does not say (memory, utilisation, bytes) is predicted by ours.
    """
    cuts = cuts_of(profile)
    period_s, nested = published_partition(cuts, cluster, model, flags)
    sizes = Links(cluster).member_sizes
    flat = list(_flattened(nested, len(cluster.levels) - 1, (0,), sizes))
    stages = [
        StagePlan(layers=cuts.layers(stage.outer, stage.inner), replicas=len(devices))
        for stage, devices in flat
    ]
    choice, devices = ScheduleChoice(), [group for _, group in flat]
    ours = estimate(profile, cluster, choice, stages, devices).prediction
    return Plan(
        profile=profile,
        cluster=cluster,
        schedule=choice,
        stages=tuple(stages),
        placement=place(cluster, devices),
        prediction=replace(ours, period_s=period_s, samples_per_s=profile.microbatch_size / period_s),
    )


def _flattened(
    nested: Sequence[NestedStage], level: int, bases: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[NestedStage, list[int]]]:
    """Yield the innermost stages with their devices, those of one copy ``copies`` replicas apart."""
    for stage in nested:
        members = range(stage.first, stage.first + stage.members)
        own = [base + member * sizes[level] for member in members for base in bases]
        if stage.inside:
            yield from _flattened(stage.inside, level - 1, own, sizes)
        else:
            yield stage, own
