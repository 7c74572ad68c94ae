"""The program: for every rank, the list of instructions that it will run.

One program has four readers (checker, simulator, drawing, executor), so it is plain data:
one row of integers an instruction, in one array a rank.  `OPERANDS` is the instruction
set: it names what the columns of a row mean for each operation.  `Instruction` is the
readable view of a row; its text form round-trips.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ALL_STAGES", "NO_SLOT", "NUM_COLUMNS", "OPERANDS", "Channel", "Group", "Instruction", "Kind",
    "Op", "Program", "Rows", "SlotCounts", "Topology",
]  # fmt: skip

Rows = NDArray[np.int32]
"""Instructions of one rank, shape (instructions, NUM_COLUMNS): op, stage, microbatch, operands."""

NO_SLOT = -1
"""An operand that is not used: the input stage receives nothing, evaluation saves nothing."""


ALL_STAGES = -1
"""The stage of a group that spans every rank."""


class Op(IntEnum):
    """What an instruction does.

    Receives and sends are posted and waited for by separate instructions, since blocking
    sends deadlock as soon as messages are large enough for rendezvous.
    """

    POST_RECV = 0
    """Let the tensors of a channel be received into a slot."""
    WAIT_RECV = 1
    """Wait until they are there."""
    POST_SEND = 2
    """Let the tensors of a slot be sent."""
    WAIT_SEND = 3
    """Wait until the slot may be overwritten."""
    FORWARD = 4
    """Run the stage forward; ``saved`` is `NO_SLOT` when nothing is kept for a backward."""
    RECOMPUTE = 5
    """Run it again from the stashed input, keeping what the backward needs."""
    BACKWARD = 6
    """Gradients of the stage's inputs and parameters; the latter accumulate."""
    BACKWARD_INPUT = 7
    """Gradients of the inputs only (zero-bubble schedules)."""
    BACKWARD_WEIGHT = 8
    """Gradients of the parameters only, accumulated (zero-bubble schedules)."""
    POST_REDUCE = 9
    """Let gradients be summed over a group as they become final in the backward that follows.

    Over all stages it is the gradients' squared norms that are summed, at once.  In a group
    that sums statistics the replicas only tell that they are here.
    """
    WAIT_REDUCE = 10
    """Wait until all that the group sums is summed; where it sums statistics, until all are here.

    The computation that follows sums them itself, layer by layer.
    """
    UPDATE = 11
    """One optimizer step: read one weight slot, write the next, clear the gradients."""


OPERANDS: Mapping[Op, tuple[str, ...]] = {
    Op.POST_RECV: ("channel", "peer", "slot"),
    Op.WAIT_RECV: ("channel", "peer", "slot"),
    Op.POST_SEND: ("channel", "peer", "slot"),
    Op.WAIT_SEND: ("channel", "peer", "slot"),
    Op.FORWARD: ("version", "weights", "input", "output", "saved"),
    Op.RECOMPUTE: ("version", "weights", "input", "saved"),
    Op.BACKWARD: ("version", "weights", "saved", "grad_in", "grad_out"),
    Op.BACKWARD_INPUT: ("version", "weights", "saved", "grad_in", "grad_out"),
    Op.BACKWARD_WEIGHT: ("version", "weights", "saved"),
    Op.POST_REDUCE: ("group",),
    Op.WAIT_REDUCE: ("group",),
    Op.UPDATE: ("version", "read", "write"),
}
"""Names of an operation's operands, in column order from column 3 on.

``version`` counts updates of the stage (0 at the start of the program); that of an
``UPDATE`` is the one it makes.  ``weights``, ``read`` and ``write`` are slots of the stage's
ring of weight versions.  ``input`` and ``output``
are slots for boundary activations (all channels of the stage together), ``grad_in`` is
the slot for gradients that arrive from later stages, ``grad_out`` for those sent to
earlier ones, ``saved`` for what autograd keeps.  Stages that receive nothing have input
slots too, for what they are fed.  The microbatch of an ``UPDATE``, and of every reduction,
is the last one that it includes, over all replicas.
"""

NUM_COLUMNS = 3 + max(len(names) for names in OPERANDS.values())

TEMPLATES: Sequence[str] = [
    " ".join([op.name, "s{1}", "k{2}", *(f"{name}={{{i}}}" for i, name in enumerate(OPERANDS[op], 3))])
    for op in Op
]
"""For each operation the format string that makes a row readable."""


class Kind(IntEnum):
    """What a channel carries."""

    ACTIVATION = 0
    GRADIENT = 1


@dataclass(frozen=True, slots=True)
class Channel:
    """An ordered stream of messages from one stage to another."""

    kind: Kind
    source_stage: int
    target_stage: int


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that sum gradients: the replicas of a stage.

    The group of `ALL_STAGES` holds every rank: what they sum before a joint update is the
    squared norm of each stage's gradients.  In a group of ``statistics`` the replicas of a stage
    run each forward and each backward together, as batch normalisation over all of them needs.
    """

    stage: int
    ranks: tuple[int, ...]
    statistics: bool = False

    @property
    def sums_gradients(self) -> bool:
        """Whether it is gradients that the group sums."""
        return self.stage != ALL_STAGES and not self.statistics


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """How many slots of each sort one replica of a stage needs."""

    weights: int = 1
    input: int = 0
    output: int = 0
    saved: int = 0
    grad_in: int = 0
    grad_out: int = 0


@dataclass(frozen=True, slots=True)
class Topology:
    """Stages, their replicas' ranks, and which stage feeds which.

    Attributes
    ----------
    ranks
        ``ranks[s][r]`` is the rank of replica ``r`` of stage ``s``.
    edges
        Pairs (source stage, target stage) between which activations flow; gradients flow
        back unless the pair is in ``no_gradient``.
    no_gradient
        Edges over which no gradient returns.
    """

    ranks: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, int], ...]
    no_gradient: frozenset[tuple[int, int]] = frozenset()

    @classmethod
    def straight(cls, replicas: Sequence[int]) -> Topology:
        """Return a pipeline with these replica counts, ranks numbered stage by stage."""
        ranks, first = [], 0
        for count in replicas:
            ranks.append(tuple(range(first, first + count)))
            first += count
        return cls(tuple(ranks), tuple((s, s + 1) for s in range(len(ranks) - 1)))

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return 1 + max(rank for ranks in self.ranks for rank in ranks)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of replicas of each stage."""
        return tuple(len(ranks) for ranks in self.ranks)

    @property
    def round(self) -> int:
        """The fewest microbatches that every stage's replicas can share evenly."""
        return math.lcm(*self.replicas)

    def replica(self, stage: int, microbatch: int) -> int:
        """Return the replica that runs a microbatch: ``microbatch mod R`` (1F1B-RR)."""
        return microbatch % len(self.ranks[stage])

    def rank(self, stage: int, microbatch: int) -> int:
        """Return the rank that runs a microbatch of a stage."""
        return self.ranks[stage][microbatch % len(self.ranks[stage])]


@dataclass(frozen=True, slots=True)
class Instruction:
    """A row, readable: ``FORWARD s1 k5 version=3 weights=1 input=1 output=0 saved=1``."""

    op: Op
    stage: int
    microbatch: int
    operands: tuple[int, ...] = ()

    @classmethod
    def from_row(cls, row: Sequence[int]) -> Instruction:
        """Decode one row of a program."""
        op = Op(int(row[0]))
        return cls(op, int(row[1]), int(row[2]), tuple(int(v) for v in row[3 : 3 + len(OPERANDS[op])]))

    @classmethod
    def parse(cls, text: str) -> Instruction:
        """Decode the text form."""
        name, stage, microbatch, *pairs = text.split()
        op = Op[name]
        values = dict(pair.split("=") for pair in pairs)
        if tuple(values) != OPERANDS[op] or stage[0] != "s" or microbatch[0] != "k":
            raise ValueError(f"{text!r} is no instruction; {name} takes {', '.join(OPERANDS[op])}")
        return cls(op, int(stage[1:]), int(microbatch[1:]), tuple(int(v) for v in values.values()))

    @property
    def row(self) -> list[int]:
        """The row of integers, padded."""
        head = [int(self.op), self.stage, self.microbatch, *self.operands]
        return head + [NO_SLOT] * (NUM_COLUMNS - len(head))

    def __getitem__(self, operand: str) -> int:
        return self.operands[OPERANDS[self.op].index(operand)]

    def __str__(self) -> str:
        return TEMPLATES[self.op].format(*self.row)


@dataclass(frozen=True)
class Program:
    """What every rank runs, from the first microbatch until the pipeline is drained.

    Attributes
    ----------
    schedule
        Name of the generator.
    topology
        Stages, ranks and edges.
    num_microbatches
        Microbatches that enter the pipeline.
    microbatches_per_update
        Microbatches whose gradients one update averages, over all replicas of the stage.
    channels, groups
        What the operands ``channel`` and ``group`` index.
    slots
        Slots of each stage.
    rows
        One array a rank.
    """

    schedule: str
    topology: Topology
    num_microbatches: int
    microbatches_per_update: tuple[int, ...]
    channels: tuple[Channel, ...]
    groups: tuple[Group, ...]
    slots: tuple[SlotCounts, ...]
    rows: tuple[Rows, ...] = field(repr=False)

    def instructions(self, rank: int) -> Iterator[Instruction]:
        """Decode the instructions of one rank."""
        return map(Instruction.from_row, self.rows[rank].tolist())
