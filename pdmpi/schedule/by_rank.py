"""Orders from what each replica does: for every rank once, or for every minibatch between two flushes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.order import Actions, Order
from pdmpi.schedule.program import Topology

__all__ = ["by_rank", "flushed", "share"]


def share(topology: Topology, stage: int, replica: int, num_microbatches: int) -> range:
    """Return the microbatches of a replica: every R-th one."""
    return range(replica, num_microbatches, len(topology.ranks[stage]))


def by_rank(topology: Topology, order: Callable[[int, int], Actions]) -> tuple[Actions, ...]:
    """Return ``order(stage, replica)`` for every rank, each of which plays one stage."""
    found = {rank: order(s, r) for s, ranks in enumerate(topology.ranks) for r, rank in enumerate(ranks)}
    return tuple(found[rank] for rank in range(topology.num_ranks))


def flushed(
    choice: ScheduleChoice, topology: Topology, num_minibatches: int, minibatch: tuple[Actions, ...]
) -> Order:
    """Return the order that repeats one minibatch's, with an update and a flush after each.

    Parameters
    ----------
    choice, topology, num_minibatches
        As for a generator.
    minibatch
        For each rank, the order of the first minibatch's microbatches.
    """
    shift = np.zeros((num_minibatches, 1, 3), np.int32)
    shift[:, 0, 2] = np.arange(num_minibatches) * choice.microbatches
    return Order(
        schedule=choice.name,
        topology=topology,
        num_microbatches=num_minibatches * choice.microbatches,
        microbatches_per_update=(choice.microbatches,) * topology.num_stages,
        actions=tuple((rows[None] + shift).reshape(-1, 3) for rows in minibatch),
    )
