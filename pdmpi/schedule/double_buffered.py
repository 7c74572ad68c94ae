"""PipeDream-2BW: double-buffered weights (Narayanan et al., ICML 2021, section 3.1).

1F1B without flushes; gradients of m microbatches accumulate to one update.  Microbatch k
uses version max(k // m - 1, 0) at every stage, so the delay is one update everywhere and two versions
suffice, given that no more than m microbatches are in flight.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdmpi.errors import InputError
from pdmpi.plan.depth import in_flight_depth
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.order import Order
from pdmpi.schedule.pipedream import asynchronous_1f1b
from pdmpi.schedule.program import Topology
from pdmpi.schedule.rules import one_stage_a_rank, split_over_replicas

__all__ = ["double_buffered"]


def double_buffered(choice: ScheduleChoice, topology: Topology, num_minibatches: int) -> Order:
    """Return 1F1B with an update each ``choice.microbatches``.

    Raises
    ------
    InputError
        When fewer microbatches accumulate than are in flight, replicas cannot share them
        evenly, or a rank plays two stages.
    """
    one_stage_a_rank(choice, topology)
    split_over_replicas(choice, topology, num_minibatches)
    replicas = topology.replicas
    depths = in_flight_depth(replicas, choice.extra_in_flight)
    in_flight = max(d * r for d, r in zip(depths, replicas, strict=True))
    m = choice.microbatches
    if m < in_flight:
        raise InputError(
            f"schedule.microbatches = {m}: schedule '2bw' accumulates at least as many microbatches as are "
            f"in flight; set it to {-(-in_flight // topology.round) * topology.round} or more"
        )

    def versions(stage: int, microbatches: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.maximum(microbatches // m - 1, 0)

    return Order(
        schedule=choice.name,
        topology=topology,
        num_microbatches=num_minibatches * m,
        microbatches_per_update=(m,) * topology.num_stages,
        actions=asynchronous_1f1b(choice, topology, num_minibatches * m),
        versions=versions,
    )
