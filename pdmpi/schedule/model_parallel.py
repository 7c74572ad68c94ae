"""Model parallelism without pipelining: one microbatch in flight, all other stages idle.

Two stages, a backward twice as long as a forward::

    F0 .  .  .  B0 -  F1 .  .  .  B1 -
    .  F0 B0 -  .  .  .  F1 B1 -  .  .
"""

from __future__ import annotations

from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.by_rank import by_rank, flushed
from pdmpi.schedule.one_f_one_b import one_f_one_b
from pdmpi.schedule.order import Order
from pdmpi.schedule.program import Topology
from pdmpi.schedule.rules import no_extra_in_flight, one_stage_a_rank, split_over_replicas, straight_only

__all__ = ["model_parallel"]


def model_parallel(choice: ScheduleChoice, topology: Topology, num_minibatches: int) -> Order:
    """Return forward and backward in turn on every stage.

    Raises
    ------
    InputError
        When a stage is replicated, or a rank plays two.
    """
    no_extra_in_flight(choice)
    one_stage_a_rank(choice, topology)
    straight_only(choice, topology, "with one minibatch in flight all replicas but one would idle")
    split_over_replicas(choice, topology, num_minibatches)
    microbatches = range(choice.microbatches)
    minibatch = by_rank(topology, lambda s, _: one_f_one_b(s, 1, microbatches))
    return flushed(choice, topology, num_minibatches, minibatch)
