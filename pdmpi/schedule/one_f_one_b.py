"""One forward, one backward: the order that PipeDream and most of its successors share."""

from __future__ import annotations

import numpy as np

from pdmpi.schedule.order import Actions, actions
from pdmpi.schedule.program import Op

__all__ = ["alternate", "one_f_one_b"]


def one_f_one_b(stage: int, depth: int, microbatches: range) -> Actions:
    """Return one replica's order: ``F0 F1 F2 B0 F3 B1 F4 B2 ...`` for a depth of 3.

    Parameters
    ----------
    stage
        The stage.
    depth
        Microbatches that the replica holds at most between forward and backward.
    microbatches
        Those of the replica.
    """
    k = np.asarray(microbatches)
    return alternate(actions(Op.FORWARD, stage, k), actions(Op.BACKWARD, stage, k), depth)


def alternate(forwards: Actions, backwards: Actions, depth: int) -> Actions:
    """Return ``depth`` forwards, then one backward and one forward in turn, then the other backwards."""
    num = len(forwards)
    warm = min(depth, num)
    index = np.arange(num)
    rows = np.empty((2 * num, 3), np.int32)
    rows[np.where(index < warm, index, 2 * index - warm + 1)] = forwards
    rows[np.where(index < num - warm, 2 * index + warm, index + num)] = backwards
    return rows
