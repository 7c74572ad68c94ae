"""What every instruction of a program costs: seconds on its device, bytes on its links, bytes of memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdmpi.plan.cluster import Cluster, Level
from pdmpi.plan.plan import Plan, StagePlan
from pdmpi.plan.terms import terms_of
from pdmpi.schedule.program import ALL_STAGES, Channel, Group, Kind, Op, Topology
from pdmpi.simulate.network import Network

__all__ = ["BUCKET_BYTES", "DEVICE_BUCKET_BYTES", "Costs", "StageCost", "costs_of"]

_MIB = 1 << 20
BUCKET_BYTES, DEVICE_BUCKET_BYTES = 4 * _MIB, 32 * _MIB
"""Size at which a bucket of gradients of a replicated stage is closed and summed, by MPI and by NCCL.

Large enough for bandwidth, small enough to leave early; a sum by NCCL takes tens of microseconds to start.
"""
_NORM_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One stage and one microbatch on a device of relative speed one.

    Attributes
    ----------
    forward_s, backward_s
        Seconds; recomputing activations costs another ``forward_s``.
    backward_input_s
        The share of ``backward_s`` that gradients of the inputs take, where a schedule
        splits the backward; the rest is for gradients of the parameters.
    update_s
        Of one optimizer step.
    parameter_bytes, gradient_bytes, state_bytes, buffer_bytes
        Of one weight version, of the gradients of what is trained, of the optimizer's
        state, and of buffers that are not versioned.
    saved_bytes
        What autograd keeps between forward and backward of one microbatch; where a schedule splits the
        backward, also what is kept between its parts.
    workspace_bytes
        Most that there is beyond that while any layer runs: what it allocates, gradients that wait.
    graph_bytes
        What the graph of a forward holds beyond that, for each saved slot.
    """

    forward_s: float
    backward_s: float
    backward_input_s: float
    update_s: float = 0.0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    state_bytes: int = 0
    buffer_bytes: int = 0
    saved_bytes: int = 0
    workspace_bytes: int = 0
    graph_bytes: int = 0

    def seconds(self, op: Op) -> float:
        """Return what an instruction keeps the device busy for; posts and waits cost nothing of their own."""
        return {
            Op.FORWARD: self.forward_s,
            Op.RECOMPUTE: self.forward_s,
            Op.BACKWARD: self.backward_s,
            Op.BACKWARD_INPUT: self.backward_input_s,
            Op.BACKWARD_WEIGHT: self.backward_s - self.backward_input_s,
            Op.UPDATE: self.update_s,
        }.get(op, 0.0)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a program's instructions.

    Attributes
    ----------
    stages
        One entry a stage.
    message_bytes
        Bytes of one message of each channel.
    network
        Links between the ranks.
    speeds
        Speed of each rank's device relative to the profiled one.
    graphed
        Whether ranks replay CUDA graphs, which hold memory for every saved slot.  Taken from the profile: a
        run whose options keep its stages eager takes less.
    library_bytes
        What libraries keep for themselves on each device.
    bucket_bytes
        Of gradients that are summed together; on GPUs taken to be summed by NCCL.
    """

    stages: tuple[StageCost, ...]
    message_bytes: Mapping[Channel, int]
    network: Network
    speeds: tuple[float, ...]
    graphed: bool = False
    library_bytes: int = 0
    bucket_bytes: int = BUCKET_BYTES

    @classmethod
    def uniform(
        cls,
        topology: Topology,
        *,
        forward_s: float = 1.0,
        backward_s: float = 2.0,
        update_s: float = 0.0,
        message_s: float = 0.0,
    ) -> Costs:
        """Return equal costs for all stages of a topology, every rank on a device of its own.

        Every message, activation or gradient, is of 1 MiB and takes ``message_s``.
        """
        rate = _MIB / message_s if message_s else math.inf
        wire = Level(name="wire", count=topology.num_ranks, bandwidth_bytes_per_s=rate)
        stage = StageCost(
            forward_s=forward_s, backward_s=backward_s, backward_input_s=backward_s / 2, update_s=update_s
        )
        size = _MIB if message_s else 0
        sizes = {Channel(Kind.ACTIVATION, a, b): size for a, b in topology.edges}
        sizes |= {Channel(Kind.GRADIENT, b, a): size for a, b in topology.edges}
        return cls(
            stages=(stage,) * topology.num_stages,
            message_bytes=sizes,
            network=Network(Cluster(name="uniform", levels=(wire,)), tuple(range(topology.num_ranks))),
            speeds=(1.0,) * topology.num_ranks,
        )

    def compute_s(self, op: Op, stage: int, rank: int) -> float:
        """Return the seconds that an instruction keeps its rank's device busy."""
        return self.stages[stage].seconds(op) / self.speeds[rank]

    def summed(self, group: Group) -> tuple[int, int]:
        """Return the bytes that a group sums, and in how many buckets.

        Statistics are a few numbers a layer: they cost one message, and the wait for the others.
        """
        if group.statistics:
            return 0, 1
        if group.stage == ALL_STAGES:
            return _NORM_BYTES * len(self.stages), 1
        return self.stages[group.stage].gradient_bytes, self.buckets(group.stage)

    def buckets(self, stage: int) -> int:
        """Return in how many buckets the gradients of a stage are summed."""
        return max(1, -(-self.stages[stage].gradient_bytes // self.bucket_bytes))


def costs_of(plan: Plan) -> Costs:
    """Return the costs of a plan's instructions, from its profile, cluster and placement.

    Where a schedule splits the backward, a layer with trained parameters is assumed to
    spend half of it on gradients of its inputs and half on those of its parameters (as a
    matrix product does), and a layer without them all of it on its inputs.
    """
    cluster = plan.cluster
    device_of = {p.rank: p.node * cluster.devices_per_node + p.device for p in plan.placement}
    devices = tuple(device_of[rank] for rank in range(plan.num_ranks))
    graph, network = plan.profile.graph, Network(cluster, devices)
    sizes: dict[Channel, int] = {}
    for (source, target), refs in plan.boundaries.items():
        sizes[Channel(Kind.ACTIVATION, source, target)] = sum(graph.spec(ref).nbytes for ref in refs)
        sizes[Channel(Kind.GRADIENT, target, source)] = sum(
            graph.spec(ref).nbytes for ref in refs if graph.returns_gradient(ref)
        )
    waited_for = {c.source_stage for c, nbytes in sizes.items() if c.kind == Kind.GRADIENT and nbytes}
    split = waited_for if terms_of(plan.schedule).splits_backward else set()
    return Costs(
        stages=tuple(
            _stage_cost(
                plan,
                stage,
                network,
                [p.rank for p in plan.placement if p.stage == number],
                splits=number in split,
            )
            for number, stage in enumerate(plan.stages)
        ),
        message_bytes=sizes,
        network=network,
        speeds=tuple(cluster.device(device).relative_speed for device in devices),
        bucket_bytes=DEVICE_BUCKET_BYTES if plan.profile.machine.get("device") == "cuda" else BUCKET_BYTES,
        graphed=plan.profile.is_graphed,
        library_bytes=plan.profile.library_bytes,
    )


def _stage_cost(
    plan: Plan, stage: StagePlan, network: Network, ranks: Sequence[int], *, splits: bool
) -> StageCost:
    """Return the costs of a stage on its ranks; what sums take of its device is part of its backwards.

    ``splits`` says whether there is a first part of its backwards, for gradients that others wait for.
    """
    profile, choice = plan.profile, plan.schedule
    per_update = terms_of(choice).microbatches_per_update(choice.microbatches, stage.replicas)
    trained = profile.graph.trained
    positions = [profile.graph.index[name] for name in stage.layers]
    layers = [(trained[i], profile.costs[i]) for i in positions]
    costs = [cost for _, cost in layers]
    gradient_bytes = sum(cost.parameter_bytes for trains, cost in layers if trains)
    adding_s = gradient_bytes * profile.accumulation_s_per_byte(per_update)
    split = sum(cost.split_bytes for cost in costs) if splits else 0
    adding_s += network.allreduce_work_s(ranks, gradient_bytes) / per_update
    return StageCost(
        forward_s=math.fsum(cost.forward_s for cost in costs),
        backward_s=math.fsum([*(cost.backward_s for cost in costs), adding_s]),
        backward_input_s=math.fsum(cost.backward_s * (0.5 if trains else 1.0) for trains, cost in layers),
        update_s=gradient_bytes * profile.update_s_per_byte,
        parameter_bytes=sum(cost.parameter_bytes for cost in costs),
        gradient_bytes=gradient_bytes,
        state_bytes=round(gradient_bytes * profile.optimizer_state_factor),
        buffer_bytes=sum(cost.buffer_bytes for cost in costs),
        saved_bytes=sum(cost.saved_bytes for cost in costs) + split,
        workspace_bytes=max((cost.workspace_bytes for cost in costs), default=0),
        graph_bytes=max(profile.graph_bytes(positions) - split, 0),  # it lies where a forward needed room
    )
