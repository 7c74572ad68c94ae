"""A partitioning problem, and what a stage of it costs, as vectors over cuts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pdmpi.plan.cluster import Cluster
from pdmpi.plan.cuts import Cuts
from pdmpi.plan.links import Links, Port
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.plan.terms import Terms, terms_of

__all__ = ["Found", "FoundStage", "Pricer", "Problem", "largest", "with_transfers"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FoundStage:
    """Layers between two cuts on devices ``first .. first + replicas - 1`` of each copy."""

    inner: int
    outer: int
    first: int
    replicas: int
    recompute: bool


@dataclass(frozen=True, slots=True)
class Found:
    """A partition: its stages in order, its copies, the largest stage period."""

    stages: tuple[FoundStage, ...]
    copies: int
    period_s: float

    @property
    def num_devices(self) -> int:
        """Devices in use."""
        return (self.stages[-1].first + self.stages[-1].replicas) * self.copies


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What to partition, on what, and under which limits.

    Attributes
    ----------
    cuts, cluster, choice
        Where to cut, the devices, the schedule.
    order
        The cluster's devices to use, ascending; all when empty.
    copies
        Copies of the pipeline, each on an equal part of the devices.
    limit_memory
        Whether a device's memory is a limit (where it is given).
    recompute
        Which stages recompute activations: ``"never"``, ``"always"``, ``"except-last"``, or
        ``"auto"``: those that do not fit otherwise.
    shape
        Replicas of every stage, when they are given rather than searched for.
    objective
        What the largest of all stages is to be small: ``"period"``, or ``"memory"`` in bytes.
    """

    cuts: Cuts
    cluster: Cluster
    choice: ScheduleChoice
    order: tuple[int, ...] = ()
    copies: int = 1
    limit_memory: bool = True
    recompute: str = "never"
    shape: tuple[int, ...] = ()
    objective: str = "period"

    @cached_property
    def device_of(self) -> tuple[int, ...]:
        """The cluster's device at each position."""
        return self.order or tuple(range(self.cluster.num_devices))

    @cached_property
    def positions(self) -> int:
        """Positions in one copy, one a device."""
        return len(self.device_of) // self.copies

    @cached_property
    def links(self) -> Links:
        """Prices of the links."""
        return Links(self.cluster)

    @cached_property
    def terms(self) -> Terms:
        """What the schedule asks of a stage."""
        return terms_of(self.choice)

    @cached_property
    def levels(self) -> int:
        """Levels that can lie inside one copy."""
        return self.level(0, self.positions - 1) + 1

    @cached_property
    def memory_limited(self) -> bool:
        """Whether memory plays a part at all."""
        return self.limit_memory and any(self.memory_bytes)

    @cached_property
    def speeds(self) -> list[float]:
        """Relative speed at each position, the slowest of the copies."""
        return self._least([self.cluster.device(d).relative_speed for d in self.device_of])

    @cached_property
    def memory_bytes(self) -> list[int]:
        """Memory at each position, the smallest of the copies; 0 where it is not limited."""
        return [int(m) for m in self._least([self.cluster.device(d).memory_bytes for d in self.device_of])]

    def _least(self, values: Sequence[float]) -> list[float]:
        return [min(values[p :: self.positions]) for p in range(self.positions)]

    def level(self, a: int, b: int) -> int:
        """Return the level that separates two positions of one copy."""
        return self.cluster.level_between(self.device_of[a], self.device_of[b])

    def allows(self, count: int) -> bool:
        """Return whether ``count`` replicas in one copy can share the microbatches of an update."""
        if self.terms.straight:
            return count * self.copies == 1
        return not self.terms.accumulates or self.choice.microbatches % (count * self.copies) == 0

    def devices(self, first: int, count: int) -> list[int]:
        """Return the devices of a stage in all copies, in the order of its replicas."""
        return [
            self.device_of[c * self.positions + p]
            for p in range(first, first + count)
            for c in range(self.copies)
        ]

    @cached_property
    def _members_before(self) -> list[list[int]]:
        """For each level and position, members that begin at or before it in one copy."""
        found = []
        for size in self.links.member_sizes:
            members = [device // size for device in self.device_of[: self.positions]]
            new = [1, *(a != b for a, b in itertools.pairwise(members))]
            found.append(list(itertools.accumulate(new)))
        return found

    def ports(self, first: int, count: int) -> list[Port]:
        """Return the price of the links of a stage's replicas in all copies, up to each level."""
        s_per_byte = s_per_message = 0.0
        found = []
        for index in range(self.levels):
            link, before = self.cluster.levels[index], self._members_before[index]
            own = before[first + count - 1] - before[first] + 1 if link.shared else count
            links = own * self.copies
            s_per_byte = max(s_per_byte, 1.0 / (links * link.bandwidth_bytes_per_s))
            s_per_message = max(s_per_message, link.latency_s / links)
            found.append(Port(s_per_byte, s_per_message))
        return found


@dataclass(frozen=True)
class Pricer:
    """Prices the stages of one problem when the first ``in_use`` positions of each copy are used."""

    problem: Problem
    in_use: int

    def periods(self, first: int, count: int, inner: slice, outer: slice, final: bool) -> NDArray[np.float64]:
        """Return compute and synchronisation periods of stages, infinite where they do not fit.

        Shape (inner cuts, outer cuts).
        """
        if self.problem.objective == "memory":
            lean = self.problem.recompute == "auto" or self._always(final)
            return self.used_bytes(first, count, inner, outer, lean)
        periods = self._fitting(first, count, inner, outer, self._always(final))
        if self.problem.recompute == "auto" and self._limit(first, count):
            again = self._fitting(first, count, inner, outer, True)
            periods = np.where(np.isfinite(periods), periods, again)
        return periods

    def recomputes(self, first: int, count: int, inner: int, outer: int, final: bool) -> bool:
        """Return whether a stage of the partition recomputes its activations."""
        if self.problem.recompute == "auto":
            one, other = slice(inner, inner + 1), slice(outer, outer + 1)
            return not np.isfinite(self._fitting(first, count, one, other, False)).all()
        return self._always(final)

    def _always(self, final: bool) -> bool:
        return self.problem.recompute == "always" or (self.problem.recompute == "except-last" and not final)

    def _fitting(
        self, first: int, count: int, inner: slice, outer: slice, recompute: bool
    ) -> NDArray[np.float64]:
        (work, _), *rest = self._work(first, count, recompute)
        periods = largest([(work[outer], -work[inner])])
        for sync, latency in rest:
            trained = self.problem.cuts.gradient_bytes
            exposed = largest([(sync[outer], latency - sync[inner])])
            if latency:
                exposed[trained[inner, None] == trained[None, outer]] = 0.0
            np.maximum(periods, exposed, out=periods)
        fits = self._fits(first, count, inner, outer, recompute)
        if fits is not None:
            periods[~fits] = np.inf
        return periods

    def _work(self, first: int, count: int, recompute: bool) -> Iterator[tuple[Floats, float]]:
        """Yield compute and synchronisation as sums over the layers before each cut, and a constant."""
        problem, cuts = self.problem, self.problem.cuts
        m = count * problem.copies
        share = 1.0 / (m * min(problem.speeds[first : first + count]))
        q = problem.terms.microbatches_per_update(problem.choice.microbatches, m)
        update = cuts.profile.update_s_per_byte / q * share
        adding = cuts.profile.accumulation_s_per_byte(q) * share
        forwards = 2.0 if recompute else 1.0
        last = problem.device_of[(problem.copies - 1) * problem.positions + first + count - 1]
        level = problem.cluster.level_between(problem.device_of[first], last)
        steps = 2 * (m - 1)
        summing = steps / m * problem.links.work_s_per_byte(level) / q * share if m > 1 else 0.0
        yield self._sums(forwards * share, share, update + adding + summing), 0.0
        if m > 1:
            port = problem.links.ring(level)
            ring = steps / m * port.s_per_byte / (q * m)
            hidden = (forwards - 1.0, 1.0)
            per_byte = update + adding * (1.0 - 1.0 / q) + ring
            vector = self._sums((forwards - hidden[0] / q) * share, share - share / q, per_byte)
            yield vector, steps * port.s_per_message / (q * m)

    def _sums(self, forward: float, backward: float, per_byte: float) -> Floats:
        cuts = self.problem.cuts
        return cuts.forward_s * forward + cuts.backward_s * backward + cuts.gradient_bytes * per_byte

    def transfer(self, ports: Sequence[Port], level: int | None, cuts: slice) -> tuple[Floats, Floats] | None:
        """Return the seconds that values sent over each cut, and gradients returned over it, take at a level.

        None at the ends of the pipeline, where the level is None.
        """
        if level is None or self.problem.objective == "memory":
            return None
        sent, returned = self.problem.cuts.sent_bytes[cuts], self.problem.cuts.returned_bytes[cuts]
        per_byte, per_message = ports[level].s_per_byte, ports[level].s_per_message
        if not per_message:
            return sent * per_byte, returned * per_byte
        return sent * per_byte + (sent > 0) * per_message, returned * per_byte + (returned > 0) * per_message

    def _limit(self, first: int, count: int) -> int:
        if not self.problem.limit_memory:
            return 0
        return min((size for size in self.problem.memory_bytes[first : first + count] if size), default=0)

    def _fits(
        self, first: int, count: int, inner: slice, outer: slice, recompute: bool
    ) -> NDArray[np.bool_] | None:
        """Return which pairs of cuts fit the devices' memory, or None when all do."""
        limit = self._limit(first, count)
        if not limit:
            return None
        used = self.used_bytes(first, count, inner, outer, recompute)
        return np.asarray(used <= limit + 0.5)

    def depth_and_versions(self, first: int, count: int) -> tuple[int, int]:
        """Return the in-flight depth and the weight versions of one replica.

        What depends on the replicas of the input stage (the share of more than one extra minibatch,
        vertical sync, a depth that is the same everywhere) is not known in the middle of a search; there
        the most that it can be is returned.
        """
        problem, copies = self.problem, self.problem.copies
        extra, own = problem.choice.extra_in_flight, count * copies
        total = self.in_use * copies
        left = total - first * copies
        behind = total - own if first == 0 else left
        share = -(-extra * (left - own) // behind) if behind else 0
        depth = -(-(left + share) // own)
        if problem.terms.even_depth and first:
            depth = max(depth, -(-(total + extra) // (problem.shape[0] if problem.shape else copies)))
        if problem.terms.versions is not None:
            return depth, problem.terms.versions
        if problem.terms.synchronised and first:
            entered = total + extra + first * copies - 1
            return depth, 1 - (1 - entered) // own
        return depth, depth

    def used_bytes(self, first: int, count: int, inner: slice, outer: slice, recompute: bool) -> Floats:
        """Return the peak bytes of one replica of each stage, shape (inner cuts, outer cuts)."""
        problem, cuts = self.problem, self.problem.cuts
        terms, choice = problem.terms, problem.choice
        depth, versions = self.depth_and_versions(first, count)
        microbatches = -(-choice.microbatches // (count * problem.copies))
        flight = microbatches if terms.holds_all else depth
        flight = min(flight, microbatches) if terms.flushes and terms.accumulates else flight
        kept = 1 if recompute else flight
        held = (
            cuts.parameter_bytes
            + cuts.gradient_bytes * (versions + cuts.profile.optimizer_state_factor)
            + cuts.buffer_bytes
            + cuts.saved_bytes * kept
        )
        plus = held + 2 * (cuts.sent_bytes + cuts.returned_bytes) + cuts.profile.library_bytes
        minus = cuts.sent_bytes * flight + 2 * cuts.returned_bytes - held
        used = minus[inner, None] + plus[None, outer]
        if any(cost.workspace_bytes for cost in cuts.profile.costs):
            used += cuts.workspace_bytes[inner, outer]
        beside = cuts.graph_bytes[inner, outer] if cuts.profile.is_graphed else None
        if terms.splits_backward:
            split = cuts.split_bytes[None, outer] - cuts.split_bytes[inner, None]
            split *= cuts.returned_bytes[inner, None] > 0
            beside = split if beside is None else np.maximum(beside, split)
        if beside is not None:
            used += kept * beside
        return used


def largest(terms: Sequence[tuple[Floats, Floats]], least: Floats | None = None) -> NDArray[np.float64]:
    """Return the largest of sums ``outer term[J] + inner term[I]``, and of ``least``, shape (I, J)."""
    out = least
    for plus, minus in terms:
        now = minus[:, None] + plus[None, :]
        out = now if out is None else np.maximum(out, now, out=now)
    assert out is not None
    return out


def with_transfers(
    periods: Floats, before: tuple[Floats, Floats] | None, behind: tuple[Floats, Floats] | None
) -> Floats:
    """Return the larger of periods and of what leaves or enters a stage's links, shape (I, J).

    ``before`` and ``behind`` are `Pricer.transfer` of the cuts on the two sides.
    """
    if before is None and behind is None:
        return periods
    if before is None:
        assert behind is not None
        return np.maximum(periods, np.maximum(behind[0], behind[1])[None, :])
    if behind is None:
        return np.maximum(periods, np.maximum(before[0], before[1])[:, None])
    return largest([(behind[0], before[1]), (behind[1], before[0])], periods)
