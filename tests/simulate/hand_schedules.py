"""Small programs written by hand, so that the simulator is tested on its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdmpi.schedule.program import (
    NO_SLOT,
    Channel,
    Group,
    Instruction,
    Kind,
    Op,
    Program,
    SlotCounts,
    Topology,
)


class Writer:
    """Writes instructions of straight or replicated pipelines, messages included."""

    def __init__(self, topology: Topology, slots: int = 64) -> None:
        self.topology = topology
        self.slots = slots
        self.channels = tuple(Channel(Kind.ACTIVATION, a, b) for a, b in topology.edges) + tuple(
            Channel(Kind.GRADIENT, b, a) for a, b in topology.edges
        )
        self.index = {channel: i for i, channel in enumerate(self.channels)}
        self.rows: list[list[list[int]]] = [[] for _ in range(topology.num_ranks)]

    def add(self, rank: int, op: Op, stage: int, k: int, *operands: int) -> None:
        self.rows[rank].append(Instruction(op, stage, k, operands).row)

    def message(self, op: Op, kind: Kind, stage: int, peer_stage: int, k: int, *, sends: bool) -> None:
        if not 0 <= peer_stage < self.topology.num_stages:
            return
        channel = Channel(kind, stage, peer_stage) if sends else Channel(kind, peer_stage, stage)
        peer = self.topology.rank(peer_stage, k)
        self.add(self.topology.rank(stage, k), op, stage, k, self.index[channel], peer, k % self.slots)

    def forward(self, stage: int, k: int) -> None:
        self.message(Op.POST_RECV, Kind.ACTIVATION, stage, stage - 1, k, sends=False)
        self.message(Op.WAIT_RECV, Kind.ACTIVATION, stage, stage - 1, k, sends=False)
        rank = self.topology.rank(stage, k)
        self.add(rank, Op.FORWARD, stage, k, 0, 0, k % self.slots, k % self.slots, k % self.slots)
        self.message(Op.POST_SEND, Kind.ACTIVATION, stage, stage + 1, k, sends=True)

    def backward(self, stage: int, k: int, reduce: int = NO_SLOT) -> None:
        rank = self.topology.rank(stage, k)
        self.message(Op.WAIT_SEND, Kind.ACTIVATION, stage, stage + 1, k, sends=True)
        self.message(Op.POST_RECV, Kind.GRADIENT, stage, stage + 1, k, sends=False)
        self.message(Op.WAIT_RECV, Kind.GRADIENT, stage, stage + 1, k, sends=False)
        if reduce != NO_SLOT:
            self.add(rank, Op.POST_REDUCE, stage, k, reduce)
        self.add(rank, Op.BACKWARD, stage, k, 0, 0, k % self.slots, k % self.slots, k % self.slots)
        self.message(Op.POST_SEND, Kind.GRADIENT, stage, stage - 1, k, sends=True)
        if reduce != NO_SLOT:
            self.add(rank, Op.WAIT_REDUCE, stage, k, reduce)
        self.message(Op.WAIT_SEND, Kind.GRADIENT, stage, stage - 1, k, sends=True)

    def update(self, stage: int, k: int, rank: int) -> None:
        self.add(rank, Op.UPDATE, stage, k, 0, 0, 0)

    def program(self, name: str, microbatches: int, per_update: int, groups: Sequence[Group] = ()) -> Program:
        stages = self.topology.num_stages
        return Program(
            schedule=name,
            topology=self.topology,
            num_microbatches=microbatches,
            microbatches_per_update=(per_update,) * stages,
            channels=self.channels,
            groups=tuple(groups),
            slots=(SlotCounts(1, 1, 1, self.slots, 1, 1),) * stages,
            rows=tuple(np.array(rows, np.int32).reshape(-1, 8) for rows in self.rows),
        )


def gpipe(stages: int, microbatches: int, minibatches: int = 1) -> Program:
    """All forwards, all backwards, an update; as often as there are minibatches."""
    writer = Writer(Topology.straight([1] * stages), slots=microbatches)
    for first in range(0, microbatches * minibatches, microbatches):
        batch = range(first, first + microbatches)
        for stage in range(stages):
            for k in batch:
                writer.forward(stage, k)
            for k in reversed(batch):
                writer.backward(stage, k)
            writer.update(stage, batch[-1], stage)
    return writer.program("gpipe", microbatches * minibatches, microbatches)


def one_f_one_b(stages: int, microbatches: int, flush: bool = True, depth: int = 0) -> Program:
    """1F1B on a straight pipeline, with one update at the end or one a microbatch."""
    writer = Writer(Topology.straight([1] * stages), slots=stages + depth)
    for stage in range(stages):
        ahead = min(stages - stage - 1 + depth, microbatches)
        for k in range(ahead):
            writer.forward(stage, k)
        for k in range(microbatches):
            if k + ahead < microbatches:
                writer.forward(stage, k + ahead)
            writer.backward(stage, k)
            if not flush:
                writer.update(stage, k, stage)
        if flush:
            writer.update(stage, microbatches - 1, stage)
    return writer.program("1f1b" if flush else "pipedream", microbatches, microbatches if flush else 1)
