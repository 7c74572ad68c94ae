"""One forward, one backward: the order that PipeDream and most of its successors share."""

from __future__ import annotations

import numpy as np

from pdmpi.schedule.order import Actions, actions
from pdmpi.schedule.program import Op

__all__ = ["one_f_one_b"]


def one_f_one_b(stage: int, depth: int, first: int, num: int, step: int = 1) -> Actions:
    """Return one replica's order: ``depth`` forwards, then one backward and one forward in turn.

    Parameters
    ----------
    stage
        The stage.
    depth
        Microbatches that the replica holds at most between forward and backward.
    first, num, step
        Its microbatches: ``first, first + step, ...``, ``num`` of them.

    Returns
    -------
    array, shape (2 num, 3)
        ``F0 F1 F2 B0 F3 B1 ... B(num-1)`` for a depth of 3.
    """
    warm = min(depth, num)
    index = np.arange(num)
    rows = np.empty((2 * num, 3), np.int32)
    microbatch = first + step * index
    forward = np.where(index < warm, index, 2 * index - warm + 1)
    backward = np.where(index < num - warm, 2 * index + warm, index + num)
    rows[forward] = actions(Op.FORWARD, stage, microbatch)
    rows[backward] = actions(Op.BACKWARD, stage, microbatch)
    return rows
