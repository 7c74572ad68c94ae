"""Data parallelism, bulk-synchronous: one stage, R replicas, gradients summed while the backward runs.

As on any replicated stage, each replica takes one of R consecutive minibatches and all step
once a round.  A minibatch that is split into microbatches accumulates their gradients, and
only the last backward of a round is reduced.
"""

from __future__ import annotations

from pdmpi.errors import InputError
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.by_rank import by_rank, share
from pdmpi.schedule.one_f_one_b import one_f_one_b
from pdmpi.schedule.order import Order
from pdmpi.schedule.program import Topology
from pdmpi.schedule.rules import no_extra_in_flight, whole_rounds

__all__ = ["data_parallel"]


def data_parallel(choice: ScheduleChoice, topology: Topology, num_minibatches: int) -> Order:
    """Return forward and backward in turn on every replica.

    Raises
    ------
    InputError
        When there is more than one stage, or a round stays incomplete.
    """
    no_extra_in_flight(choice)
    if topology.num_stages > 1:
        raise InputError(
            f"schedule 'data-parallel' takes one stage, but the plan has {topology.num_stages}; plan again "
            "for this schedule"
        )
    whole_rounds(num_minibatches, topology)
    num = num_minibatches * choice.microbatches
    return Order(
        schedule=choice.name,
        topology=topology,
        num_microbatches=num,
        microbatches_per_update=(topology.replicas[0] * choice.microbatches,),
        actions=by_rank(topology, lambda s, r: one_f_one_b(s, 1, share(topology, s, r, num))),
    )
