"""A profile of twelve equal layers, and plans made from it."""

from __future__ import annotations

from pdmpi.graph.graph import Layer, LayerGraph, Ref, TensorSpec
from pdmpi.plan.cluster import Cluster, Device, Level
from pdmpi.plan.partition import partition
from pdmpi.plan.plan import Plan, ScheduleChoice
from pdmpi.plan.profile import LayerCost, Profile

LAYERS = 12
LAYER_BYTES = 1 << 20
MICROBATCH = 8
SPEC = TensorSpec(shape=(MICROBATCH, 1024))


def profile() -> Profile:
    """Return layers of 2 ms forward, 4 ms backward, 1 MiB of parameters, 32 kiB between them."""
    layers = [
        Layer(name="x", kind="Input", outputs=(TensorSpec(shape=(MICROBATCH, 1024), requires_grad=False),))
    ]
    for i in range(LAYERS):
        layers.append(
            Layer(
                name=f"l{i}", kind="Linear", inputs=(Ref(layers[-1].name),), outputs=(SPEC,),
                parameters=(f"l{i}.weight",),
            )
        )  # fmt: skip
    cost = LayerCost(
        forward_s=0.002, backward_s=0.004, output_bytes=SPEC.nbytes, parameter_bytes=LAYER_BYTES,
        saved_bytes=3 * SPEC.nbytes, workspace_bytes=1000,
    )  # fmt: skip
    nothing = LayerCost(forward_s=0.0, backward_s=0.0, output_bytes=SPEC.nbytes)
    return Profile(
        graph=LayerGraph(tuple(layers), (Ref(layers[-1].name),)),
        costs=(nothing,) + (cost,) * LAYERS,
        microbatch_size=MICROBATCH,
        optimizer_state_factor=1.0,
    )


def cluster(memory_bytes: int = 1 << 30, bandwidth_bytes_per_s: float = 1e9, devices: int = 4) -> Cluster:
    """Return equal devices on one switch."""
    level = Level(name="switch", count=devices, bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=1e-5)
    return Cluster(name="small", levels=(level,), devices=(Device(memory_bytes=memory_bytes),))


def small_plan(
    *shape: int, schedule: ScheduleChoice | None = None, memory_bytes: int = 1 << 30, bandwidth: float = 1e9
) -> Plan:
    """Return a plan of these replica counts."""
    where = cluster(memory_bytes, bandwidth, sum(shape))
    return partition(profile(), where, schedule or ScheduleChoice(), shape=shape)
