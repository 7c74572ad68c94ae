"""No slot is overwritten while a microbatch still needs it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pdmpi.schedule.checks.part import Part
from pdmpi.schedule.program import NO_SLOT, Kind, Op
from pdmpi.schedule.violation import Fault, Violation

__all__ = ["check_lifetimes"]

Indices = NDArray[np.int64]


def check_lifetimes(part: Part) -> Iterator[Violation]:
    """Yield slots that are filled again before their last use.

    An input slot lives from the post of its receive to the end of the backward, an output
    slot from the forward to the end of its send, gradients likewise, a saved slot from the
    forward (or recomputation) to the end of the backward.
    """
    forward, backward, last = part.forward, part.backward, part.last_use
    begin = _extreme(part, Op.POST_RECV, Kind.ACTIVATION, forward.row, np.minimum)
    yield from _overlaps(part, "input", forward["input"], begin, last.row)
    end = _extreme(part, Op.WAIT_SEND, Kind.ACTIVATION, forward.row, np.maximum)
    yield from _overlaps(part, "output", forward["output"], forward.row, end)
    if not part.trained:
        return
    again = part.located(Op.RECOMPUTE)
    yield from _overlaps(
        part, "saved", backward["saved"], np.where(again.there, again.row, forward.row), last.row
    )
    begin = _extreme(part, Op.POST_RECV, Kind.GRADIENT, backward.row, np.minimum)
    yield from _overlaps(part, "grad_in", backward["grad_in"], begin, backward.row)
    end = _extreme(part, Op.WAIT_SEND, Kind.GRADIENT, backward.row, np.maximum)
    yield from _overlaps(part, "grad_out", backward["grad_out"], backward.row, end)


def _extreme(part: Part, op: Op, kind: Kind, start: Indices, extreme: np.ufunc) -> Indices:
    """Return each microbatch's first (or last) row among ``start`` and its messages of a kind."""
    found = start
    for index, channel in part.channels:
        here = channel.target_stage if op == Op.POST_RECV else channel.source_stage
        if channel.kind == kind and here == part.stage:
            message = part.located(op, part.on_channel(op, index))
            found = np.where(message.there & (found >= 0), extreme(found, message.row), found)
    return found


def _overlaps(part: Part, sort: str, slot: Indices, begin: Indices, end: Indices) -> Iterator[Violation]:
    lives = np.flatnonzero((slot != NO_SLOT) & (begin >= 0) & (end >= 0))
    by_slot = lives[np.lexsort((begin[lives], slot[lives]))]
    early, late = by_slot[:-1], by_slot[1:]
    bad = (slot[early] == slot[late]) & (begin[late] < end[early])
    for a, b in zip(early[bad].tolist(), late[bad].tolist(), strict=True):
        yield Violation(
            Fault.SLOT, part.rank, int(begin[b]),
            f"{sort} slot {slot[a]} of stage {part.stage} is filled for microbatch {part.microbatches[b]} "
            f"while microbatch {part.microbatches[a]} needs it (until instruction {end[a]})",
        )  # fmt: skip
