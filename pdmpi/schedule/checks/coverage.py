"""Each microbatch runs once forward and once backward on one replica of each stage, in a right order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pdmpi.schedule.checks.part import Located, Part
from pdmpi.schedule.program import NO_SLOT, Channel, Kind, Op
from pdmpi.schedule.violation import Fault, Violation

__all__ = ["check_coverage", "check_messages", "check_sequence"]


def check_coverage(part: Part) -> Iterator[Violation]:
    """Yield microbatches that a replica lacks, has twice, or should not have."""
    yield from _each_once(part, Op.FORWARD, True)
    yield from _each_once(part, Op.BACKWARD, part.trained and not part.split)
    yield from _each_once(part, Op.BACKWARD_INPUT, part.trained and part.split)
    yield from _each_once(part, Op.BACKWARD_WEIGHT, part.trained and part.split)
    forward = part.forward
    kept = forward["saved"] != NO_SLOT
    if part.trained:
        yield from _each_once(part, Op.RECOMPUTE, True, forward.there & ~kept)
    else:
        yield from _each_once(part, Op.RECOMPUTE, False)
        for row in forward.row[forward.there & kept].tolist():
            yield Violation(Fault.COVERAGE, part.rank, row, "saves for a backward that never comes")


def check_sequence(part: Part) -> Iterator[Violation]:
    """Yield computations that come before what they need, or use another's saved slot."""
    if not part.trained:
        return
    forward, backward, last = part.forward, part.backward, part.last_use
    again = part.located(Op.RECOMPUTE)
    yield from _after(part, forward, backward, "backward")
    yield from _after(part, forward, again, "recomputation")
    yield from _after(part, again, backward, "backward")
    yield from _same(part, "saved", again, backward, again.there & backward.there)
    yield from _same(part, "input", forward, again, forward.there & again.there)
    kept = forward.there & (forward["saved"] != NO_SLOT)
    yield from _same(part, "saved", forward, backward, kept & backward.there)
    if part.split:
        yield from _after(part, backward, last, "weight part of the backward")
        yield from _same(part, "saved", backward, last, backward.there & last.there)


def check_messages(part: Part) -> Iterator[Violation]:
    """Yield boundary tensors that are not received before they are used, or not sent once they are made."""
    for index, channel in part.channels:
        activation = channel.kind == Kind.ACTIVATION
        if not activation and not part.trained:
            continue
        user = part.forward if activation else part.backward
        if channel.target_stage == part.stage:
            yield from _received(part, index, channel, user, "input" if activation else "grad_in")
        if channel.source_stage == part.stage:
            yield from _sent(part, index, channel, user, "output" if activation else "grad_out")


def _received(part: Part, index: int, channel: Channel, user: Located, operand: str) -> Iterator[Violation]:
    what = f"the {channel.kind.name.lower()} from stage {channel.source_stage}"
    post = part.located(Op.POST_RECV, part.on_channel(Op.POST_RECV, index))
    wait = part.located(Op.WAIT_RECV, part.on_channel(Op.WAIT_RECV, index))
    for op in (Op.POST_RECV, Op.WAIT_RECV):
        yield from _each_once(part, op, True, user.there, part.on_channel(op, index), what)
    yield from _after(part, post, wait, f"wait for {what}")
    yield from _after(part, wait, user, f"use of {what}")
    yield from _same_slot(part, post["slot"], wait["slot"], wait, post.there & wait.there)
    yield from _same_slot(part, wait["slot"], user[operand], user, wait.there & user.there)


def _sent(part: Part, index: int, channel: Channel, maker: Located, operand: str) -> Iterator[Violation]:
    what = f"the {channel.kind.name.lower()} for stage {channel.target_stage}"
    post = part.located(Op.POST_SEND, part.on_channel(Op.POST_SEND, index))
    wait = part.located(Op.WAIT_SEND, part.on_channel(Op.WAIT_SEND, index))
    for op in (Op.POST_SEND, Op.WAIT_SEND):
        yield from _each_once(part, op, True, maker.there, part.on_channel(op, index), what)
    yield from _after(part, maker, post, f"send of {what}")
    yield from _after(part, post, wait, f"wait for the send of {what}")
    yield from _same_slot(part, maker[operand], post["slot"], post, maker.there & post.there)
    yield from _same_slot(part, post["slot"], wait["slot"], wait, post.there & wait.there)


def _each_once(
    part: Part,
    op: Op,
    wanted: bool,
    which: NDArray[np.bool_] | None = None,
    at: NDArray[np.int64] | None = None,
    what: str = "",
) -> Iterator[Violation]:
    """Yield microbatches that lack a ``wanted`` operation (where ``which``), or have one too many."""
    rows = part.at(op) if at is None else at
    name = f"{op.name} of {what}" if what else op.name
    microbatch = part.rows[rows, 2]
    foreign = microbatch % part.num_replicas != part.replica
    for row in rows[foreign].tolist():
        k = int(part.rows[row, 2])
        yield Violation(
            Fault.COVERAGE, part.rank, row,
            f"{name}: microbatch {k} of stage {part.stage} belongs to replica {k % part.num_replicas}, "
            f"not {part.replica}",
        )  # fmt: skip
    own = rows[~foreign]
    number = part.rows[own, 2] // part.num_replicas
    count = np.bincount(number, minlength=len(part.microbatches))[: len(part.microbatches)]
    due = np.full(len(part.microbatches), wanted)
    if which is not None:
        due &= which
    for i in np.flatnonzero(due & (count == 0)).tolist():
        k = int(part.microbatches[i])
        yield Violation(Fault.COVERAGE, part.rank, -1, f"stage {part.stage} has no {name} of microbatch {k}")
    excess = count > due
    if excess.any():
        for row, i in zip(own.tolist(), number.tolist(), strict=True):
            if excess[i] and (not due[i] or row != own[number == i][0]):
                again = f"once more ({count[i]} times)" if due[i] else "needlessly"
                k = int(part.microbatches[i])
                yield Violation(
                    Fault.COVERAGE, part.rank, row, f"{name} of microbatch {k} at stage {part.stage} {again}"
                )


def _after(part: Part, early: Located, late: Located, what: str) -> Iterator[Violation]:
    bad = early.there & late.there & (late.row < early.row)
    for row, k in zip(late.row[bad].tolist(), part.microbatches[bad].tolist(), strict=True):
        yield Violation(
            Fault.SEQUENCE, part.rank, row, f"{what} of microbatch {k} stands before its {early.op.name}"
        )


def _same(part: Part, operand: str, a: Located, b: Located, where: NDArray[np.bool_]) -> Iterator[Violation]:
    yield from _same_slot(part, a[operand], b[operand], b, where, operand)


def _same_slot(
    part: Part,
    given: NDArray[np.int64],
    used: NDArray[np.int64],
    user: Located,
    where: NDArray[np.bool_],
    name: str = "",
) -> Iterator[Violation]:
    bad = where & (given != used)
    for row, k, due, found in zip(
        user.row[bad].tolist(), part.microbatches[bad].tolist(), given[bad], used[bad], strict=True
    ):
        slot = f"{name} slot" if name else "slot"
        yield Violation(
            Fault.SLOT, part.rank, row, f"uses {slot} {found}, but microbatch {k} is in slot {due}"
        )
