"""What one stage does with each microbatch of a program, as far as it repeats: what a CUDA graph replays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pdmpi.schedule.program import NO_SLOT, Op

__all__ = ["Pass", "passes_of"]

Slots = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pass:
    """The slots of one microbatch from its forward to the update that follows its backward.

    Two microbatches with equal passes run the same kernels on the same addresses.

    Attributes
    ----------
    forward
        Slots of weights, input, output and of what is saved (`NO_SLOT` before a recomputation).
    backward
        Slots of weights, what is saved, the gradients that arrive and those that leave.
    splits
        Whether the backward comes in two parts; ``opens``, ``reduces`` and ``update`` are of the second.
    recomputes
        Whether the forward runs again before the backward.
    opens
        Whether the backward is the first of its update on this rank: gradients start from nothing.
    reduces
        Whether gradients are summed over replicas as this backward finishes them.
    update
        Weight slots read and written, where an update follows the backward before any other.
    """

    forward: Slots
    backward: Slots = ()
    splits: bool = False
    recomputes: bool = False
    opens: bool = True
    reduces: bool = False
    update: Slots = ()


def passes_of(rows: Iterable[Sequence[int]], stage: int) -> Mapping[int, Pass]:
    """Return the pass of each microbatch that a rank trains at a stage."""
    found: dict[int, Pass] = {}
    due: list[int] = []
    reduces = False
    for op, at, k, *operands in rows:
        if at != stage:
            continue
        if op == Op.FORWARD:
            _, weights, inputs, output, saved = operands[:5]
            found[k] = Pass((weights, inputs, output, saved))
        elif op == Op.RECOMPUTE:
            found[k] = replace(found[k], recomputes=True)
        elif op == Op.POST_REDUCE:
            reduces = True
        elif op == Op.BACKWARD_INPUT:
            found[k] = replace(found[k], backward=tuple(operands[1:5]), splits=True)
        elif op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            slots = tuple(operands[1:5]) if op == Op.BACKWARD else found[k].backward
            found[k] = replace(found[k], backward=slots, opens=not due, reduces=reduces)
            due.append(k)
            reduces = False
        elif op == Op.UPDATE:
            if due:
                found[due[-1]] = replace(found[due[-1]], update=(operands[1], operands[2]))
            due.clear()
            reduces = False  # a sum over all stages, right before the update, is of no backward
    return {k: one for k, one in found.items() if one.backward and one.backward[1] != NO_SLOT}
