"""ZB-H1: flushed 1F1B with the backward in two parts (Qi et al., ICLR 2024, section 2.2).

Three stages, five microbatches, all parts equally long::

    F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
    .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
    .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

Only the gradients of a stage's inputs (``I``) hold up others; those of its parameters
(``W``) lag behind by the stage's number and fill what 1F1B leaves idle.  No stage keeps more microbatches
than the deepest one of 1F1B, which is the first where stages have one replica.
"""

from __future__ import annotations

import numpy as np

from pdmpi.plan.depth import in_flight_depth
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.by_rank import by_rank, flushed, share
from pdmpi.schedule.order import Actions, Order, actions, joined
from pdmpi.schedule.program import Op, Topology
from pdmpi.schedule.rules import one_stage_a_rank, split_over_replicas

__all__ = ["zb_h1"]


def zb_h1(choice: ScheduleChoice, topology: Topology, num_minibatches: int) -> Order:
    """Return ZB-H1's order.

    Raises
    ------
    InputError
        When replicas cannot share the microbatches evenly, or a rank plays two stages.
    """
    one_stage_a_rank(choice, topology)
    split_over_replicas(choice, topology, num_minibatches)
    depths = in_flight_depth(topology.replicas, choice.extra_in_flight)

    def replica(s: int, r: int) -> Actions:
        return _order(s, depths[s], max(0, depths[0] - depths[s]), share(topology, s, r, choice.microbatches))

    return flushed(choice, topology, num_minibatches, by_rank(topology, replica))


def _order(stage: int, depth: int, lag: int, microbatches: range) -> Actions:
    """Return ``I`` of each microbatch, then ``W`` of the ``lag``-th before it, then ``F`` of the next."""
    k = np.asarray(microbatches)
    index = np.arange(len(k))
    warm = min(depth, len(k))
    forward = np.where(index < warm, index - warm, 3 * (index - warm) + 2)
    turn = np.concatenate([forward, 3 * index, 3 * (index + lag) + 1])
    rows = joined([actions(op, stage, k) for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)])
    return rows[np.argsort(turn, kind="stable")]
