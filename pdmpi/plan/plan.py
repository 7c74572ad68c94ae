"""A plan: which layers run where, in which schedule, and what that is predicted to give.

A plan is self-contained: it embeds the profile and the cluster it was made from, so that
it can be simulated, explained and re-made for another shape without any other file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdmpi.graph import Ref
from pdmpi.plan.cluster import Cluster
from pdmpi.plan.profile import Profile

__all__ = ["Placement", "Plan", "Prediction", "ScheduleChoice", "StagePlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage: its layers, its number of replicas, and whether activations are recomputed."""

    layers: tuple[str, ...]
    replicas: int = 1
    recompute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one replica of one stage runs.

    Attributes
    ----------
    stage, replica
        Which replica of which stage.
    rank
        MPI rank.  A rank may play several stages (interleaved schedules).
    node, device
        Index of the node and of the device inside it.
    """

    stage: int
    replica: int
    rank: int
    node: int
    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleChoice:
    """The schedule's name and its parameters, as in the ``[schedule]`` table of a run's configuration."""

    name: str = "pipedream"
    microbatches: int = 1
    extra_in_flight: int = 0
    recompute: str = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the planner expects of the plan.

    Attributes
    ----------
    period_s
        Seconds between two microbatches in the steady state.
    samples_per_s
        Samples trained a second.
    utilisation
        Busy fraction of each rank.
    memory_bytes
        Peak bytes of each rank.
    link_bytes
        Bytes that cross each level of the cluster for one microbatch, inner to outer.
    """

    period_s: float
    samples_per_s: float
    utilisation: tuple[float, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    link_bytes: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Stages, their places, the schedule, and the profile and cluster they were made from.

    Attributes
    ----------
    stages
        In pipeline order; every layer of ``profile.graph`` in exactly one.
    placement
        One entry for each replica of each stage, ordered by stage, then replica.
    prediction
        For this plan.
    alternatives
        Predicted samples per second of other ways to use the same cluster, by name
        (``"data-parallel"``, ``"model-parallel"``, ``"gpipe"``).
    versions
        Versions of the tools that made it.
    """

    profile: Profile
    cluster: Cluster
    schedule: ScheduleChoice
    stages: tuple[StagePlan, ...]
    placement: tuple[Placement, ...]
    prediction: Prediction
    alternatives: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """Number of MPI ranks that run the plan."""
        return 1 + max(p.rank for p in self.placement)

    @property
    def nodes(self) -> list[int]:
        """Node of each rank."""
        node_of = {p.rank: p.node for p in self.placement}
        return [node_of[rank] for rank in range(self.num_ranks)]

    @property
    def devices(self) -> list[list[int]]:
        """Devices of the cluster that play each stage, in the order of its replicas."""
        groups: list[list[int]] = [[] for _ in self.stages]
        for p in self.placement:
            groups[p.stage].append(p.node * self.cluster.devices_per_node + p.device)
        return groups

    @property
    def copies(self) -> int:
        """Copies of the pipeline, each on its own part of the cluster; replica r is in copy r mod copies."""
        return next(
            copies
            for copies in range(math.gcd(*(stage.replicas for stage in self.stages)), 0, -1)
            if copies == 1 or self._is_copied(copies)
        )

    def _is_copied(self, copies: int) -> bool:
        part = self.cluster.num_devices // copies
        return (
            len(self.stages) > 1
            and self.cluster.num_devices % copies == 0
            and all(device // part == r % copies for group in self.devices for r, device in enumerate(group))
        )

    @property
    def boundaries(self) -> dict[tuple[int, int], tuple[Ref, ...]]:
        """Values sent from stage to stage, by (source, target); see `LayerGraph.crossing`."""
        return self.profile.graph.crossing([s.layers for s in self.stages])

    def rank_of(self, stage: int, replica: int) -> int:
        """Return the MPI rank of one replica of one stage."""
        return next(p.rank for p in self.placement if (p.stage, p.replica) == (stage, replica))
