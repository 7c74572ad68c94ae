"""GPipe: all forwards, all backwards, flush (Huang et al., NeurIPS 2019, figure 2c).

Four microbatches on three stages, a backward twice as long as a forward::

    F0 F1 F2 F3 .  .  .  .  .  .  B3 -  B2 -  B1 -  B0 -
    .  F0 F1 F2 F3 .  .  .  B3 -  B2 -  B1 -  B0 -  .  .
    .  .  F0 F1 F2 F3 B3 -  B2 -  B1 -  B0 -  .  .  .  .

Backwards run last to first, so the last microbatch never needs a recomputation.
"""

from __future__ import annotations

import numpy as np

from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.by_rank import by_rank, flushed, share
from pdmpi.schedule.order import Actions, Order, actions, joined
from pdmpi.schedule.program import Op, Topology
from pdmpi.schedule.rules import no_extra_in_flight, one_stage_a_rank, split_over_replicas

__all__ = ["gpipe"]


def gpipe(choice: ScheduleChoice, topology: Topology, num_minibatches: int) -> Order:
    """Return GPipe's order.

    Raises
    ------
    InputError
        When replicas cannot share the microbatches evenly, or a rank plays two stages.
    """
    no_extra_in_flight(choice)
    one_stage_a_rank(choice, topology)
    split_over_replicas(choice, topology, num_minibatches)

    def replica(s: int, r: int) -> Actions:
        k = np.asarray(share(topology, s, r, choice.microbatches))
        return joined([actions(Op.FORWARD, s, k), actions(Op.BACKWARD, s, k[::-1])])

    return flushed(choice, topology, num_minibatches, by_rank(topology, replica))
