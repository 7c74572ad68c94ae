"""PipeDream with vertical sync (Narayanan et al., SOSP 2019, section 3.3).

The order of PipeDream, but a minibatch uses at every stage the version that the input stage
held when it entered: w[t+1] = w[t] - lr * grad(f; w[t-S+1] at all S stages).  So every stage
keeps as many versions as the input stage.

Stages with other numbers of replicas step in other rounds; there a minibatch uses the
newest version that includes no more minibatches than the input stage's did.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from pdmpi.plan.depth import in_flight_depth
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.order import Order
from pdmpi.schedule.pipedream import pipedream
from pdmpi.schedule.program import Topology

__all__ = ["vertical_sync"]


def vertical_sync(choice: ScheduleChoice, topology: Topology, num_minibatches: int) -> Order:
    """Return PipeDream's order with the input stage's version at every stage.

    Raises
    ------
    InputError
        As `pipedream` does.
    """
    replicas = topology.replicas
    depth = in_flight_depth(replicas, choice.extra_in_flight)[0]

    def versions(stage: int, microbatches: NDArray[np.int64]) -> NDArray[np.int64]:
        entered: NDArray[np.int64] = np.maximum(0, microbatches // replicas[0] - depth + 1)
        return entered * replicas[0] // replicas[stage]

    return dataclasses.replace(pipedream(choice, topology, num_minibatches), versions=versions)
