"""PipeDream: asynchronous 1F1B-RR with weight stashing (Narayanan et al., SOSP 2019, sections 3.2, 3.3).

Four stages, a backward twice as long as a forward::

    F0 F1 F2 F3 .  .  .  .  .  .  B0 -  F4 B1 -  F5 B2 -  F6 B3 -
    .  F0 F1 F2 .  .  .  .  B0 -  F3 B1 -  F4 B2 -  F5 B3 -  F6 B4
    .  .  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  F4 B3 -  F5 B4 -  F6
    .  .  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  F4 B4 -  F5 B5 -

Every replica steps once a round and nothing is flushed.  A forward uses the newest weights
of its stage: minibatch k uses version max(0, k - S + 1 + s) at stage s of S straight ones.
The backward uses the same version.
"""

from __future__ import annotations

from pdmpi.plan.depth import in_flight_depth
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.by_rank import by_rank, share
from pdmpi.schedule.one_f_one_b import one_f_one_b
from pdmpi.schedule.order import Actions, Order
from pdmpi.schedule.program import Topology
from pdmpi.schedule.rules import one_microbatch, one_stage_a_rank, whole_rounds

__all__ = ["asynchronous_1f1b", "pipedream"]


def pipedream(choice: ScheduleChoice, topology: Topology, num_minibatches: int) -> Order:
    """Return the order of asynchronous 1F1B-RR.

    Raises
    ------
    InputError
        When a minibatch is split, a rank plays two stages, or a round stays incomplete.
    """
    one_microbatch(choice)
    one_stage_a_rank(choice, topology)
    whole_rounds(num_minibatches, topology)
    return Order(
        schedule=choice.name,
        topology=topology,
        num_microbatches=num_minibatches,
        microbatches_per_update=topology.replicas,
        actions=asynchronous_1f1b(choice, topology, num_minibatches),
    )


def asynchronous_1f1b(
    choice: ScheduleChoice, topology: Topology, num_microbatches: int
) -> tuple[Actions, ...]:
    """Return 1F1B for every rank over any number of microbatches, never flushed in between."""
    depths = in_flight_depth(topology.replicas, choice.extra_in_flight)

    def replica(s: int, r: int) -> Actions:
        return one_f_one_b(s, depths[s], share(topology, s, r, num_microbatches))

    return by_rank(topology, replica)
