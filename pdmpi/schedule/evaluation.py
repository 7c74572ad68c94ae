"""Forward only: what an evaluation pass runs, with the newest weights and nothing saved."""

from __future__ import annotations

import numpy as np

from pdmpi.errors import InputError
from pdmpi.schedule.lower import lower
from pdmpi.schedule.order import Actions, Order, actions, joined
from pdmpi.schedule.program import Op, Program, Topology

__all__ = ["evaluation"]


def evaluation(topology: Topology, num_microbatches: int) -> Program:
    """Return a program that runs microbatches forward through all stages.

    Any number of microbatches is taken; the last round over replicas may stay incomplete.
    A rank that plays several stages takes as many microbatches at a time through each as
    there are ranks.
    """
    if num_microbatches < 1:
        raise InputError(f"{num_microbatches} microbatches to evaluate: take at least 1")
    stages: list[list[tuple[int, int]]] = [[] for _ in range(topology.num_ranks)]
    for stage, ranks in enumerate(topology.ranks):
        for replica, rank in enumerate(ranks):
            stages[rank].append((stage, replica))
    order = Order(
        schedule="evaluation",
        topology=topology,
        num_microbatches=num_microbatches,
        microbatches_per_update=(0,) * topology.num_stages,
        actions=tuple(_forwards(topology, played, num_microbatches) for played in stages),
    )
    return lower(order)


def _forwards(topology: Topology, played: list[tuple[int, int]], num_microbatches: int) -> Actions:
    numbers = {
        stage: np.arange(replica, num_microbatches, len(topology.ranks[stage])) for stage, replica in played
    }
    longest = max(len(k) for k in numbers.values())
    block = longest if len(played) == 1 else topology.num_ranks
    return joined(
        [
            actions(Op.FORWARD, stage, k[first : first + block])
            for first in range(0, longest, max(block, 1))
            for stage, k in numbers.items()
        ]
    )
