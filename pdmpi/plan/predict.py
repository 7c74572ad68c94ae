"""What a plan is expected to give: the cost model, stage by stage.

For one microbatch on one replica of a stage, with F and B its seconds of forward and
backward (recomputation adds another F to B), U of its optimizer step, m replicas, q
microbatches a replica between two updates (1 for PipeDream), and A the seconds of the ring
allreduce of its gradients over the slowest link that the replicas span,
2 (m - 1) (bytes / m / (bandwidth * efficiency) + latency) (Patarasuk and Yuan, 2009), beside which a core
or GPU computes C seconds longer:

    work     = F + B + (U + C) / q                the device is busy
    sync     = F + B + (A - B + U) / q            the allreduce ends after the backward
    transfer = what leaves or enters the links of all replicas, whichever is more
    period   = max(work / m, sync / m, transfer)

The allreduce runs beside the backward of the last microbatch before the update, which is
what the runtime does, and not beside the next forward.  PipeDream (Harlap et al. 2018,
section 3.2; Narayanan et al. 2019, section 3.1) takes max(F + B, A) / m, which is lower when
A exceeds B: there the allreduce also hides behind the forward.

A boundary is priced at the slowest link between the two stages' devices, each way at once
(full duplex), latency included; every replica has a link of its own unless the level is
shared (a node's network card), and a stage's links carry activations and gradients of both
its boundaries.  The original counts a boundary once, over the replicas of the later stage.

Where ranks play several stages their periods add up.  A schedule that does not flush runs
at the slowest stage's period, provided enough microbatches are in flight: the round trip
from a stage to the end and back, divided by the microbatches in flight at that stage,
bounds it too.  A flush of M microbatches takes M periods and the time to fill and drain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdmpi.plan.cluster import Cluster
from pdmpi.plan.depth import in_flight_depth, synchronised_versions
from pdmpi.plan.links import Links, Port
from pdmpi.plan.plan import Placement, Prediction, ScheduleChoice, StagePlan
from pdmpi.plan.profile import Profile
from pdmpi.plan.terms import Terms, terms_of

__all__ = ["Estimate", "StageEstimate", "cut_bytes", "estimate", "memory_bytes", "place"]


_NO_PORT = Port(0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """What one stage is expected to cost.

    Attributes
    ----------
    forward_s, backward_s, update_s
        Of one microbatch on one replica; the backward with its recomputation.
    sync_s
        Allreduce of the stage's gradients.
    transfer_s
        Seconds that the busiest direction of the stage's links is taken, per microbatch.
    period_s
        Seconds of the stage per microbatch, all replicas together.
    bound
        What makes it so: ``"compute"``, ``"synchronisation"`` or ``"transfer"``.
    depth
        In-flight depth of one replica.
    memory_bytes
        Peak of one replica.
    memory_parts
        The same, by what it is for.
    parameter_bytes, gradient_bytes, sent_bytes
        Of the stage, of what is trained of it, and of the boundary behind it, forward.
    """

    forward_s: float
    backward_s: float
    update_s: float
    sync_s: float
    transfer_s: float
    period_s: float
    bound: str
    depth: int
    memory_bytes: int
    memory_parts: dict[str, int]
    parameter_bytes: int
    gradient_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Stages and the whole.

    Attributes
    ----------
    stages
        One entry a stage.
    steady_s
        The slowest stage's period.
    round_trip_s
        The bound of the microbatches in flight, 0 for a flushing schedule.
    prediction
        For the plan.
    """

    stages: tuple[StageEstimate, ...]
    steady_s: float
    round_trip_s: float
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over the layers of one stage, on a device of relative speed one."""

    forward_s: float
    backward_s: float
    parameters: int
    gradients: int
    buffers: int
    saved: int
    split: int
    graphs: int
    workspace: int


def _sums(profile: Profile, stage: StagePlan) -> _Sums:
    trained = profile.graph.trained
    positions = [profile.graph.index[name] for name in stage.layers]
    costs = [profile.costs[i] for i in positions]
    forward = math.fsum(c.forward_s for c in costs)
    return _Sums(
        forward_s=forward,
        backward_s=math.fsum(c.backward_s for c in costs) + (forward if stage.recompute else 0.0),
        parameters=sum(c.parameter_bytes for c in costs),
        gradients=sum(c.parameter_bytes for i, c in zip(positions, costs, strict=True) if trained[i]),
        buffers=sum(c.buffer_bytes for c in costs),
        saved=sum(c.saved_bytes for c in costs),
        split=sum(c.split_bytes for c in costs),
        graphs=profile.graph_bytes(positions),
        workspace=max((c.workspace_bytes for c in costs), default=0),
    )


def _versions(terms: Terms, replicas: Sequence[int], extra: int) -> tuple[int, ...]:
    """Return the weight versions that a replica of each stage holds."""
    if terms.versions is not None:
        return (terms.versions,) * len(replicas)
    return (synchronised_versions if terms.synchronised else in_flight_depth)(replicas, extra)


def cut_bytes(profile: Profile, stages: Sequence[StagePlan]) -> list[tuple[int, int]]:
    """Return bytes forward and bytes of gradients backward over each cut behind a stage.

    A value that several later stages read is counted at every cut that it crosses, once.
    """
    graph = profile.graph
    stage_of = {name: s for s, stage in enumerate(stages) for name in stage.layers}
    last: dict[object, int] = {ref: len(stages) - 1 for ref in graph.outputs}
    for ref, names in graph.consumers.items():
        last[ref] = max(last.get(ref, 0), *(stage_of[name] for name in names))
    totals = [[0, 0] for _ in stages]
    for ref in dict.fromkeys([*graph.outputs, *graph.consumers]):
        spec = graph.spec(ref)
        grad = spec.nbytes if graph.returns_gradient(ref) else 0
        for s in range(stage_of[ref.layer], last[ref]):
            totals[s][0] += spec.nbytes
            totals[s][1] += grad
    return [(a, b) for a, b in totals]


def memory_bytes(
    sums: _Sums, terms: Terms, state_factor: float, depth: int, versions: int, microbatches: int,
    recompute: bool, entering: tuple[int, int], leaving: tuple[int, int], library_bytes: int,
) -> dict[str, int]:  # fmt: skip
    """Return the peak bytes of one replica, by what they are for.

    ``microbatches`` are the replica's own of an update; ``entering`` and ``leaving`` are (activation,
    gradient) bytes of the cuts before and behind the stage; ``library_bytes`` are the profile's.
    """
    flight = microbatches if terms.holds_all else depth
    flight = min(flight, microbatches) if terms.flushes and terms.accumulates else flight
    kept = 1 if recompute else flight
    split = sums.split if terms.splits_backward and entering[1] else 0
    return {
        "weights": sums.parameters + sums.gradients * (versions - 1),
        "gradients": sums.gradients,
        "optimizer_state": round(sums.gradients * state_factor),
        "buffers": sums.buffers,
        "saved": (sums.saved + split) * kept,
        "graphs": max(sums.graphs - split, 0) * kept,  # what is kept lies where a forward needed room
        "slots": entering[0] * flight + 2 * (entering[1] + leaving[0] + leaving[1]),
        "workspace": sums.workspace + library_bytes,
    }


def estimate(
    profile: Profile,
    cluster: Cluster,
    choice: ScheduleChoice,
    stages: Sequence[StagePlan],
    devices: Sequence[Sequence[int]],
    copies: int = 1,
) -> Estimate:
    """Return what a plan is expected to give.

    Parameters
    ----------
    stages
        In pipeline order.
    devices
        Devices of each stage's replicas; replica ``r`` belongs to copy ``r mod copies``.
    copies
        Copies of the whole pipeline, each on a part of the cluster of its own; microbatches
        stay in their copy since replicas are served round-robin.
    """
    terms = terms_of(choice)
    links = Links(cluster)
    replicas = [stage.replicas for stage in stages]
    depths = in_flight_depth(replicas, choice.extra_in_flight)
    versions = _versions(terms, replicas, choice.extra_in_flight)
    cuts = [(0, 0), *cut_bytes(profile, stages)]
    own = [group[::copies] for group in devices]
    outward = [links.level(own[s][0], own[s + 1][-1]) for s in range(len(stages) - 1)]
    found = []
    for s, stage in enumerate(stages):
        before = links.port(devices[s], outward[s - 1]) if s else _NO_PORT
        behind = links.port(devices[s], outward[s]) if s < len(outward) else _NO_PORT
        leaving = behind.seconds(cuts[s + 1][0]) + before.seconds(cuts[s][1])
        entering = before.seconds(cuts[s][0]) + behind.seconds(cuts[s + 1][1])
        sums = _sums(profile, stage)
        parts = memory_bytes(
            sums,
            terms,
            profile.optimizer_state_factor,
            max(depths[0], depths[s]) if terms.even_depth else depths[s],
            versions[s],
            -(-choice.microbatches // stage.replicas),
            stage.recompute,
            cuts[s],
            cuts[s + 1],
            profile.library_bytes,
        )
        found.append(
            _stage_estimate(
                profile, terms, choice, stage, sums, parts, depths[s], cuts[s + 1][0],
                speed=min(cluster.device(d).relative_speed for d in devices[s]),
                sync_s=links.allreduce_s(devices[s], sums.gradients),
                summing_s=links.allreduce_work_s(devices[s], sums.gradients),
                transfer_s=max(leaving, entering),
            )
        )  # fmt: skip
    hops = [
        links.message_s(level, cuts[s + 1][0]) + links.message_s(level, cuts[s + 1][1])
        for s, level in enumerate(outward)
    ]
    steady = max(stage.period_s for stage in found)
    trip = 0.0 if terms.flushes else _round_trip_s(found, replicas, hops)
    ranks = [[p.rank for p in places] for places in _by_stage(place(cluster, devices), len(stages))]
    chunks = sum(replicas) // (1 + max(max(group) for group in ranks))
    steady = max(steady, _busiest_s(found, ranks, replicas))
    period = _period_s(choice, terms, found, hops, max(steady, trip), chunks)
    busy, memory = _per_rank(found, ranks, replicas, profile.library_bytes)
    prediction = Prediction(
        period_s=period,
        samples_per_s=profile.microbatch_size / period if period else 0.0,
        utilisation=tuple(seconds / period if period else 0.0 for seconds in busy),
        memory_bytes=tuple(memory),
        link_bytes=_link_bytes(links, choice, terms, found, devices, cuts),
    )
    return Estimate(stages=tuple(found), steady_s=steady, round_trip_s=trip, prediction=prediction)


def place(cluster: Cluster, devices: Sequence[Sequence[int]]) -> tuple[Placement, ...]:
    """Return the placement of stages on devices; a device is one rank, numbered as first met."""
    ranks: dict[int, int] = {}
    found = []
    for s, group in enumerate(devices):
        for r, device in enumerate(group):
            node, own = divmod(device, cluster.devices_per_node)
            rank = ranks.setdefault(device, len(ranks))
            found.append(Placement(stage=s, replica=r, rank=rank, node=node, device=own))
    return tuple(found)


def _by_stage(placement: Sequence[Placement], count: int) -> list[list[Placement]]:
    return [[p for p in placement if p.stage == s] for s in range(count)]


def _per_rank(
    stages: Sequence[StageEstimate],
    ranks: Sequence[Sequence[int]],
    replicas: Sequence[int],
    library_bytes: int,
) -> tuple[list[float], list[int]]:
    """Return each rank's busy seconds per microbatch of the pipeline, and its bytes (libraries' once)."""
    count = 1 + max(max(group) for group in ranks)
    busy, memory = [0.0] * count, [0] * count
    for stage, group, m in zip(stages, ranks, replicas, strict=True):
        for rank in group:
            busy[rank] += (stage.forward_s + stage.backward_s) / m
            memory[rank] += stage.memory_bytes - (library_bytes if memory[rank] else 0)
    return busy, memory


def _busiest_s(
    stages: Sequence[StageEstimate], ranks: Sequence[Sequence[int]], replicas: Sequence[int]
) -> float:
    """Return the period of the busiest rank where ranks play several stages, 0 where none does."""
    total: dict[int, float] = {}
    for stage, group in zip(stages, ranks, strict=True):
        for rank in group:
            total[rank] = total.get(rank, 0.0) + stage.period_s
    return max(total.values()) if len(total) < sum(replicas) else 0.0


def _stage_estimate(
    profile: Profile, terms: Terms, choice: ScheduleChoice, stage: StagePlan, sums: _Sums,
    parts: dict[str, int], depth: int, sent_bytes: int, *, speed: float, sync_s: float, summing_s: float,
    transfer_s: float,
) -> StageEstimate:  # fmt: skip
    m = stage.replicas
    q = terms.microbatches_per_update(choice.microbatches, m)
    forward = sums.forward_s / speed
    backward = (sums.backward_s + sums.gradients * profile.accumulation_s_per_byte(q)) / speed
    update = sums.gradients * profile.update_s_per_byte / speed
    period, bound = max(
        ((forward + backward + (update + summing_s / speed) / q) / m, "compute"),
        ((forward + backward + (sync_s - backward + update) / q) / m, "synchronisation"),
        (transfer_s, "transfer"),
        key=lambda pair: pair[0],
    )
    return StageEstimate(
        forward_s=forward, backward_s=backward, update_s=update, sync_s=sync_s, transfer_s=transfer_s,
        period_s=period, bound=bound, depth=depth, memory_bytes=sum(parts.values()), memory_parts=parts,
        parameter_bytes=sums.parameters, gradient_bytes=sums.gradients, sent_bytes=sent_bytes,
    )  # fmt: skip


def _round_trip_s(stages: Sequence[StageEstimate], replicas: Sequence[int], hops: Sequence[float]) -> float:
    """Return the longest round trip from a stage to the end and back, per microbatch in flight there."""
    trip, longest = 0.0, 0.0
    for s in reversed(range(len(stages))):
        trip += stages[s].forward_s + stages[s].backward_s + (hops[s] if s < len(hops) else 0.0)
        longest = max(longest, trip / (stages[s].depth * replicas[s]))
    return longest


def _period_s(
    choice: ScheduleChoice, terms: Terms, stages: Sequence[StageEstimate], hops: Sequence[float],
    steady_s: float, chunks: int,
) -> float:  # fmt: skip
    """Return the seconds per microbatch of a schedule, its filling and draining included."""
    through = math.fsum(s.forward_s + s.backward_s for s in stages)
    if choice.name == "model-parallel":
        return through + math.fsum(hops) + stages[0].update_s
    if not (terms.flushes and terms.accumulates):
        return steady_s
    slowest = max(stages, key=lambda stage: stage.period_s)
    own = (slowest.forward_s + slowest.backward_s) * chunks
    weights = {"zb-h1": 1.0, "zb-v": 2.0}.get(choice.name, 0.0)
    filled = weights * math.fsum(s.backward_s / 2 for s in stages[1:])
    fill = max((through - own) / chunks - filled, 0.0)
    return steady_s + (fill + math.fsum(hops)) / choice.microbatches


def _link_bytes(
    links: Links, choice: ScheduleChoice, terms: Terms, stages: Sequence[StageEstimate],
    devices: Sequence[Sequence[int]], cuts: Sequence[tuple[int, int]],
) -> tuple[float, ...]:  # fmt: skip
    """Return the bytes over each level for one microbatch: boundaries both ways, and allreduces."""
    totals = [0.0] * len(links.cluster.levels)
    for s, (stage, group) in enumerate(zip(stages, devices, strict=True)):
        per_update = max(choice.microbatches, len(group)) if terms.accumulates else len(group)
        for level, moved in enumerate(links.ring_bytes(group, stage.gradient_bytes)):
            totals[level] += moved / per_update
        if s + 1 < len(stages):
            for level, share in enumerate(links.boundary_shares(group, devices[s + 1])):
                totals[level] += share * sum(cuts[s + 1])
    return tuple(totals)
