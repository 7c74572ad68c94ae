"""Flushed 1F1B: PipeDream-Flush (Narayanan et al., ICML 2021, section 3.2), DAPPLE (Fan et al., PPoPP 2021).

Four microbatches on three stages, a backward twice as long as a forward::

    F0 F1 F2 .  .  .  .  B0 -  F3 B1 -  .  B2 -  .  B3 -
    .  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  .  B3 -  .  .
    .  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  .  .  .  .

The bubble is GPipe's; the microbatches kept are as many as the stage is deep, not all.
"""

from __future__ import annotations

from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.by_rank import flushed
from pdmpi.schedule.order import Order
from pdmpi.schedule.pipedream import asynchronous_1f1b
from pdmpi.schedule.program import Topology
from pdmpi.schedule.rules import one_stage_a_rank, split_over_replicas

__all__ = ["flushed_1f1b"]


def flushed_1f1b(choice: ScheduleChoice, topology: Topology, num_minibatches: int) -> Order:
    """Return 1F1B that ends with every minibatch.

    Raises
    ------
    InputError
        When replicas cannot share the microbatches evenly, or a rank plays two stages.
    """
    one_stage_a_rank(choice, topology)
    split_over_replicas(choice, topology, num_minibatches)
    minibatch = asynchronous_1f1b(choice, topology, choice.microbatches)
    return flushed(choice, topology, num_minibatches, minibatch)
