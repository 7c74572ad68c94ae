"""Every number of a program is within what the program declares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from pdmpi.schedule.lower import channels_of
from pdmpi.schedule.program import (
    ALL_STAGES,
    NO_SLOT,
    NUM_COLUMNS,
    OPERANDS,
    Kind,
    Op,
    Program,
    SlotCounts,
    Topology,
)
from pdmpi.schedule.violation import Fault, Violation

__all__ = ["check_counts", "check_shape"]

_SLOT_SORTS = {
    "weights": "weights", "read": "weights", "write": "weights", "input": "input", "output": "output",
    "saved": "saved", "grad_in": "grad_in", "grad_out": "grad_out",
}  # fmt: skip
"""The sort of slot that an operand counts in."""

_OPTIONAL = frozenset({"input", "output", "saved", "grad_in", "grad_out"})
"""Operands that may be `NO_SLOT`."""


def check_shape(program: Program) -> Iterator[Violation]:
    """Yield what no other check could be run on: the other checks trust these numbers."""
    declared = list(_declarations(program))
    yield from declared
    if declared:
        return
    sorts = {field.name for field in fields(SlotCounts)}
    limits = {sort: np.array([getattr(slots, sort) for slots in program.slots]) for sort in sorts}
    played: list[list[int]] = [[] for _ in program.rows]
    for stage, ranks in enumerate(program.topology.ranks):
        for rank in ranks:
            played[rank].append(stage)
    for rank in range(len(program.rows)):
        yield from _rows(program, rank, played[rank], limits)


def check_counts(program: Program) -> Iterator[Violation]:
    """Yield microbatch counts that leave an update or a round over replicas incomplete."""
    for stage, per_update in enumerate(program.microbatches_per_update):
        replicas = len(program.topology.ranks[stage])
        if per_update % replicas:
            yield Violation(
                Fault.COUNT, -1, -1,
                f"stage {stage} averages {per_update} microbatches an update, which its {replicas} replicas "
                "cannot share evenly",
            )  # fmt: skip
        if per_update and program.num_microbatches % per_update:
            yield Violation(
                Fault.COUNT, -1, -1,
                f"{program.num_microbatches} microbatches do not fill updates of {per_update} "
                f"at stage {stage}",
            )  # fmt: skip


def _declarations(program: Program) -> Iterator[Violation]:
    def wrong(message: str) -> Violation:
        return Violation(Fault.SHAPE, -1, -1, message)

    topology = program.topology
    num_stages = topology.num_stages
    if program.num_microbatches < 1:
        yield wrong(f"{program.num_microbatches} microbatches")
    for name, values in (
        ("microbatches_per_update", program.microbatches_per_update),
        ("slots", program.slots),
    ):
        if len(values) != num_stages:
            yield wrong(f"{len(values)} entries of {name} for {num_stages} stages")
    if any(count < 0 for count in program.microbatches_per_update):
        yield wrong("a negative number of microbatches per update")
    if not num_stages or not all(topology.ranks):
        yield wrong("a stage without ranks")
        return
    if len(program.rows) != topology.num_ranks:
        yield wrong(f"instructions for {len(program.rows)} ranks, stages on {topology.num_ranks}")
    for stage, ranks in enumerate(topology.ranks):
        if len(set(ranks)) != len(ranks) or min(ranks) < 0:
            yield wrong(f"stage {stage} is on ranks {ranks}")
    for source, target in topology.edges:
        if not 0 <= source < target < num_stages:
            yield wrong(f"an edge from stage {source} to stage {target}")
    if sorted(program.channels, key=repr) != sorted(channels_of(topology), key=repr):
        yield wrong("the channels are not those of the topology's edges")
    for index, group in enumerate(program.groups):
        if not -1 <= group.stage < num_stages or group.ranks != _members(topology, group.stage):
            yield wrong(f"group {index} is neither the replicas of a stage nor all ranks")
        if group.statistics and len(group.ranks) == 1:
            yield wrong(f"group {index} sums the statistics of one replica")
    for one, count in Counter((group.stage, group.statistics) for group in program.groups).items():
        if count > 1:
            yield wrong(
                "several groups of all stages"
                if one[0] == ALL_STAGES
                else f"stage {one[0]} has several groups"
            )
    for rank, rows in enumerate(program.rows):
        if rows.ndim != 2 or rows.shape[1] != NUM_COLUMNS or rows.dtype.kind != "i":
            yield wrong(f"rank {rank}: rows of shape {rows.shape} and type {rows.dtype}")


def _members(topology: Topology, stage: int) -> tuple[int, ...]:
    return tuple(range(topology.num_ranks)) if stage == ALL_STAGES else topology.ranks[stage]


def _rows(
    program: Program, rank: int, played: list[int], limits: Mapping[str, NDArray[np.int64]]
) -> Iterator[Violation]:
    rows = program.rows[rank]

    def wrong(bad: NDArray[np.bool_], message: str) -> Iterator[Violation]:
        for row in np.flatnonzero(bad).tolist():
            yield Violation(Fault.SHAPE, rank, row, message.format(*rows[row].tolist()))

    unknown = ~np.isin(rows[:, 0], list(Op))
    yield from wrong(unknown, "no operation has number {0}")
    foreign = ~np.isin(rows[:, 1], played)
    yield from wrong(foreign, f"stage {{1}} is not played by rank {rank}")
    outside = (rows[:, 2] < 0) | (rows[:, 2] >= program.num_microbatches)
    yield from wrong(outside, f"microbatch {{2}} of {program.num_microbatches}")
    sound = ~(unknown | foreign | outside)
    for op in Op:
        mine = sound & (rows[:, 0] == op)
        if not mine.any():
            continue
        if op in (Op.POST_RECV, Op.WAIT_RECV, Op.POST_SEND, Op.WAIT_SEND):
            yield from _messages(program, rank, op, mine)
            continue
        for column, name in enumerate(OPERANDS[op], start=3):
            value = rows[:, column]
            if name in _SLOT_SORTS:
                sort = _SLOT_SORTS[name]
                limit = limits[sort][rows[:, 1] * sound]
                bad = mine & ((value >= limit) | (value < (NO_SLOT if name in _OPTIONAL else 0)))
                yield from wrong(bad, f"{name} = {{{column}}}: stage {{1}} has no such {sort} slot")
            elif name == "group":
                bad = mine & ((value < 0) | (value >= len(program.groups)))
                yield from wrong(bad, f"no group has number {{{column}}}")
            else:
                yield from wrong(mine & (value < 0), f"{name} = {{{column}}}")


def _messages(program: Program, rank: int, op: Op, mine: NDArray[np.bool_]) -> Iterator[Violation]:
    rows = program.rows[rank]
    sending = op in (Op.POST_SEND, Op.WAIT_SEND)
    for row in np.flatnonzero(mine & ((rows[:, 3] < 0) | (rows[:, 3] >= len(program.channels)))).tolist():
        yield Violation(Fault.SHAPE, rank, row, f"no channel has number {rows[row, 3]}")
    known = mine & (rows[:, 3] >= 0) & (rows[:, 3] < len(program.channels))
    for index in np.unique(rows[known, 3]).tolist():
        channel = program.channels[index]
        here, there = channel.source_stage, channel.target_stage
        sort = "output" if channel.kind == Kind.ACTIVATION else "grad_out"
        if not sending:
            here, there = there, here
            sort = "input" if channel.kind == Kind.ACTIVATION else "grad_in"
        at = np.flatnonzero(mine & (rows[:, 3] == index))
        ranks = np.array(program.topology.ranks[there])
        due = ranks[rows[at, 2] % len(ranks)]
        limit: int = getattr(program.slots[here], sort)
        for bad, message in (
            (rows[at, 1] != here, f"channel {{3}} does not {'start' if sending else 'end'} at stage {{1}}"),
            (rows[at, 4] != due, f"peer {{4}} does not run microbatch {{2}} of stage {there}"),
            (
                (rows[at, 5] < 0) | (rows[at, 5] >= limit),
                f"slot = {{5}}: stage {here} has no such {sort} slot",
            ),
        ):
            for row in at[bad].tolist():
                yield Violation(Fault.SHAPE, rank, row, message.format(*rows[row].tolist()))
