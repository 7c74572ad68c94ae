"""Staleness: how many updates behind its stage a gradient is when it is applied."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdmpi.schedule.program import Op, Program

__all__ = ["version_lag"]


def version_lag(program: Program) -> tuple[NDArray[np.int64], ...]:
    """Return, for each stage, the version lag of every microbatch.

    The lag is the version that the update with a microbatch's gradient reads, less the
    version that its forward used: in the steady state S - 1 - s for PipeDream at stage s of S straight
    ones, S - 1 with vertical sync, 1 for 2BW, and 0 for whatever flushes.

    Returns
    -------
    tuple of arrays, shape (num_microbatches,)
        Zeros where a stage has no updates.
    """
    lags = []
    for stage, ranks in enumerate(program.topology.ranks):
        lag = np.zeros(program.num_microbatches, np.int64)
        per_update = program.microbatches_per_update[stage]
        for rank in ranks if per_update else ():
            rows = program.rows[rank]
            forwards = rows[(rows[:, 0] == Op.FORWARD) & (rows[:, 1] == stage)]
            microbatch, version = forwards[:, 2], forwards[:, 3]
            lag[microbatch] = microbatch // per_update - version
        lags.append(lag)
    return tuple(lags)
