"""A partitioning problem, and what a stage of it costs, as vectors over cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pdmpi.plan.cluster import Cluster
from pdmpi.plan.cuts import Cuts
from pdmpi.plan.links import Links
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.plan.terms import Terms, terms_of

__all__ = ["Found", "FoundStage", "Pricer", "Problem", "largest"]

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


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What to partition, on what, and under which limits.

    Attributes
    ----------
    cuts, cluster, choice
        Where to cut, the devices, the schedule.
    copies
        Copies of the pipeline; each has ``cluster.num_devices // copies`` devices.
    limit_memory
        Whether a device's memory is a limit (where it is given).
    recompute
        Which stages recompute activations: ``"never"``, ``"always"``, ``"except-last"``, or
        ``"auto"``: those that do not fit otherwise.
    replica_counts
        Replica counts of a stage in one copy that are tried; all when empty.
    shape
        Replicas of every stage, when they are given rather than searched for.
    """

    cuts: Cuts
    cluster: Cluster
    choice: ScheduleChoice
    copies: int = 1
    limit_memory: bool = True
    recompute: str = "never"
    replica_counts: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()

    @property
    def devices(self) -> int:
        """Devices of one copy."""
        return self.cluster.num_devices // self.copies

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
        return self.links.level(0, self.devices - 1) + 1

    @cached_property
    def memory_limited(self) -> bool:
        """Whether memory plays a part at all."""
        return self.limit_memory and any(device.memory_bytes for device in self.cluster.devices)

    def ranks_of(self, first: int, count: int) -> list[int]:
        """Return the devices of a stage in all copies, in the order of its replicas."""
        return [c * self.devices + d for d in range(first, first + count) for c in range(self.copies)]


@dataclass(frozen=True)
class Pricer:
    """Prices the stages of one problem when the first ``in_use`` devices of each copy are used."""

    problem: Problem
    in_use: int

    def periods(self, first: int, count: int, inner: slice, outer: slice, final: bool) -> NDArray[np.float64]:
        """Return compute and synchronisation periods of stages, infinite where they do not fit.

        Shape (inner cuts, outer cuts).
        """
        always = self.problem.recompute == "always" or (self.problem.recompute == "except-last" and not final)
        periods = self._fitting(first, count, inner, outer, always)
        if self.problem.recompute == "auto" and self._limit(first, count):
            again = self._fitting(first, count, inner, outer, True)
            periods = np.where(np.isfinite(periods), periods, again)
        return periods

    def recomputes(self, first: int, count: int, inner: int, outer: int, final: bool) -> bool:
        """Return whether a stage of the partition recomputes its activations."""
        if self.problem.recompute == "auto":
            one, other = slice(inner, inner + 1), slice(outer, outer + 1)
            return not np.isfinite(self._fitting(first, count, one, other, False)).all()
        return self.problem.recompute == "always" or (self.problem.recompute == "except-last" and not final)

    def _fitting(
        self, first: int, count: int, inner: slice, outer: slice, recompute: bool
    ) -> NDArray[np.float64]:
        periods = largest(self._work(first, count, recompute), inner, outer)
        fits = self._fits(first, count, inner, outer, recompute)
        if fits is not None:
            periods[~fits] = np.inf
        return periods

    def _work(self, first: int, count: int, recompute: bool) -> list[tuple[Floats, Floats]]:
        """Return the terms of compute and of synchronisation."""
        problem, cuts = self.problem, self.problem.cuts
        ranks = problem.ranks_of(first, count)
        m = len(ranks)
        speed = min(problem.cluster.device(d).relative_speed for d in ranks)
        q = max(problem.choice.microbatches / m, 1.0) if problem.terms.accumulates else 1.0
        backward = cuts.backward_s + (cuts.forward_s if recompute else 0.0)
        compute = cuts.forward_s + backward
        update = cuts.gradient_bytes * (cuts.profile.update_s_per_byte / q)
        busy = (compute + update) / (m * speed)
        found = [(busy, -busy)]
        if m > 1:
            port = problem.links.port((0,), problem.links.level(min(ranks), max(ranks)))
            steps = 2 * (m - 1)
            ring = cuts.gradient_bytes * (steps / m * port.s_per_byte / (q * m))
            sync = (compute - backward / q + update) / (m * speed) + ring
            found.append((sync + steps * port.s_per_message / (q * m), -sync))
        return found

    def transfer(
        self, first: int, count: int, entering: int | None, leaving: int | None
    ) -> list[tuple[Floats, Floats]]:
        """Return the terms of the links, entering and leaving at these levels (None at the ends)."""
        cuts, ranks = self.problem.cuts, self.problem.ranks_of(first, count)

        def cost(level: int, nbytes: Floats) -> Floats:
            port = self.problem.links.port(ranks, level)
            return np.where(nbytes > 0, port.s_per_message + nbytes * port.s_per_byte, 0.0)

        nothing = np.zeros(len(cuts))
        ways = ((cuts.sent_bytes, cuts.returned_bytes), (cuts.returned_bytes, cuts.sent_bytes))
        return [
            (
                nothing if leaving is None else cost(leaving, behind),
                nothing if entering is None else cost(entering, before),
            )
            for behind, before in ways
            if leaving is not None or entering is not None
        ]

    def _limit(self, first: int, count: int) -> int:
        if not self.problem.limit_memory:
            return 0
        sizes = [self.problem.cluster.device(d).memory_bytes for d in self.problem.ranks_of(first, count)]
        return min((size for size in sizes if size), default=0)

    def _fits(
        self, first: int, count: int, inner: slice, outer: slice, recompute: bool
    ) -> NDArray[np.bool_] | None:
        """Return which pairs of cuts fit the devices' memory, or None when all do."""
        problem, cuts, limit = self.problem, self.problem.cuts, self._limit(first, count)
        if not limit:
            return None
        terms, choice = problem.terms, problem.choice
        last = first + count == self.in_use
        depth = -(-(self.in_use - first) // count) + (0 if last else choice.extra_in_flight)
        flight = choice.microbatches if terms.holds_all else depth
        flight = min(flight, choice.microbatches) if terms.flushes and terms.accumulates else flight
        versions = terms.versions if terms.versions is not None else depth
        held = (
            cuts.parameter_bytes * versions
            + cuts.gradient_bytes * (1 + cuts.profile.optimizer_state_factor)
            + cuts.buffer_bytes
            + cuts.saved_bytes * (1 if recompute else flight)
        )
        plus = held + 2 * (cuts.sent_bytes + cuts.returned_bytes)
        minus = cuts.sent_bytes * flight + 2 * cuts.returned_bytes - held
        used = plus[None, outer] + minus[inner, None]
        if any(cost.workspace_bytes for cost in cuts.profile.costs):
            used += cuts.workspace_bytes[inner, outer]
        return np.asarray(used <= limit + 0.5)


def largest(
    terms: Sequence[tuple[Floats, Floats]], inner: slice, outer: slice, out: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Return the largest of sums ``outer term[J] + inner term[I]``, and of ``out``, shape (I, J)."""
    for plus, minus in terms:
        now = minus[inner, None] + plus[None, outer]
        out = now if out is None else np.maximum(out, now, out=now)
    assert out is not None
    return out
