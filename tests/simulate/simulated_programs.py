"""Programs for tests of the simulator: written as text, or of every schedule, with random costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from pdmpi.plan.cluster import Cluster, Level
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.program import Channel, Group, Instruction, Kind, Program, SlotCounts, Topology
from pdmpi.schedule.registry import generate
from pdmpi.simulate.costs import Costs, StageCost
from pdmpi.simulate.network import Network

ACTIVATION = Channel(Kind.ACTIVATION, 0, 1)
GRADIENT = Channel(Kind.GRADIENT, 1, 0)


def written(
    topology: Topology,
    *texts: str,
    channels: Sequence[Channel] = (ACTIVATION, GRADIENT),
    groups: Sequence[Group] = (),
    microbatches: int = 1,
) -> Program:
    """Return a program from the text of each rank's instructions, one a line."""
    rows = [
        [Instruction.parse(line.strip()).row for line in text.strip().splitlines() if line.strip()]
        for text in texts
    ]
    return Program(
        schedule="written",
        topology=topology,
        num_microbatches=microbatches,
        microbatches_per_update=(1,) * topology.num_stages,
        channels=tuple(channels),
        groups=tuple(groups),
        slots=(SlotCounts(),) * topology.num_stages,
        rows=tuple(np.array(r, np.int32).reshape(-1, 8) for r in rows),
    )


def topology_for(name: str, ranks: int, replicas: Sequence[int]) -> Topology:
    """Return a topology that a schedule takes."""
    if name == "interleaved":
        stages = tuple((rank,) for rank in range(ranks)) * 2
    elif name == "zb-v":
        half = tuple((rank,) for rank in range(ranks))
        stages = half + half[::-1]
    elif name == "data-parallel":
        return Topology.straight([ranks])
    elif name == "model-parallel":
        return Topology.straight([1] * ranks)
    else:
        return Topology.straight(replicas)
    return Topology(stages, tuple((s, s + 1) for s in range(len(stages) - 1)))


SCHEDULE_NAMES = (
    "pipedream", "pipedream-vsync", "2bw", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v",
    "data-parallel", "model-parallel",
)  # fmt: skip
ASYNCHRONOUS = ("pipedream", "pipedream-vsync", "data-parallel", "model-parallel")


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draw a program of any schedule: 1-5 stages, 1-3 replicas."""
    name = draw(st.sampled_from(SCHEDULE_NAMES))
    replicas = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    topology = topology_for(name, draw(st.integers(1, 4)), replicas)
    if name in ASYNCHRONOUS:
        choice = ScheduleChoice(name=name)
        minibatches = topology.round * draw(st.integers(1, 6))
    else:
        whole = -(-topology.num_ranks // topology.round) * topology.round
        microbatches = whole + topology.round * draw(st.integers(0, 3))
        choice = ScheduleChoice(name=name, microbatches=microbatches)
        minibatches = draw(st.integers(1, 2))
    together: set[int] = set()
    if name in ("gpipe", "1f1b"):
        choice = replace(choice, recompute=draw(st.sampled_from(["never", "except-last", "always"])))
        if name == "gpipe" or len(set(topology.replicas)) == 1:  # flushed 1F1B may wait for ever otherwise
            together = draw(st.sets(st.integers(0, topology.num_stages - 1)))
    return generate(choice, topology, minibatches, joint_statistics=together)


@st.composite
def costs_for(draw: st.DrawFn, program: Program, *, contended: bool = True) -> Costs:
    """Draw unequal costs in eighths of a second, on a cluster of nodes with shared or own links."""
    eighths = st.integers(0, 24).map(lambda n: n / 8)
    positive = st.integers(1, 24).map(lambda n: n / 8)
    stages = []
    for _ in range(program.topology.num_stages):
        backward = draw(positive)
        stages.append(
            StageCost(
                forward_s=draw(positive),
                backward_s=backward,
                backward_input_s=backward / 2,
                update_s=draw(eighths),
                gradient_bytes=draw(st.sampled_from([0, 1 << 20, 24 << 20])),
            )
        )
    ranks = program.topology.num_ranks
    rate = 8 << 20
    inner = Level(name="bus", count=2, bandwidth_bytes_per_s=4 * rate, latency_s=1 / 64)
    outer = Level(
        name="wire",
        count=-(-ranks // 2),
        bandwidth_bytes_per_s=rate,
        shared=draw(st.booleans()),
        latency_s=0.125,
    )
    size = st.sampled_from([0, 1 << 20, 5 << 20, 16 << 20])
    return Costs(
        stages=tuple(stages),
        message_bytes={channel: draw(size) if contended else 0 for channel in program.channels},
        network=Network(Cluster(name="two", levels=(inner, outer)), tuple(range(ranks))),
        speeds=tuple(draw(st.sampled_from([1.0, 1.0, 0.5])) for _ in range(ranks)),
    )


def renumbered(program: Program, costs: Costs, new: Sequence[int]) -> tuple[Program, Costs]:
    """Return the same program and costs with rank ``r`` called ``new[r]``."""
    topology = program.topology
    ranks = tuple(tuple(new[r] for r in own) for own in topology.ranks)
    rows: list[np.ndarray] = [np.zeros((0, 8), np.int32)] * topology.num_ranks
    devices, speeds = [0] * len(new), [0.0] * len(new)
    for rank, old in enumerate(program.rows):
        copy = old.copy()
        messages = copy[:, 0] < 4
        copy[messages, 4] = np.array(new, np.int32)[copy[messages, 4]]
        rows[new[rank]] = copy
        devices[new[rank]], speeds[new[rank]] = costs.network.devices[rank], costs.speeds[rank]
    groups = tuple(replace(g, ranks=tuple(new[r] for r in g.ranks)) for g in program.groups)
    moved = replace(program, topology=replace(topology, ranks=ranks), rows=tuple(rows), groups=groups)
    network = replace(costs.network, devices=tuple(devices))
    return moved, replace(costs, network=network, speeds=tuple(speeds))
