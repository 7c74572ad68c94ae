"""Interleaved 1F1B: several stages a rank, flushed (Narayanan et al., SC 2021, section 2.2).

Stage s is on rank s mod P of P ranks.  A rank takes P microbatches at a time through each
of its V stages, which cuts the bubble of 1F1B by V and multiplies the messages by V.
"""

from __future__ import annotations

import numpy as np

from pdmpi.errors import InputError
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.by_rank import flushed
from pdmpi.schedule.one_f_one_b import alternate
from pdmpi.schedule.order import Actions, Order, actions
from pdmpi.schedule.program import Op, Topology
from pdmpi.schedule.rules import equal_replicas, no_extra_in_flight, split_over_replicas

__all__ = ["interleaved"]


def interleaved(choice: ScheduleChoice, topology: Topology, num_minibatches: int) -> Order:
    """Return interleaved 1F1B.

    Raises
    ------
    InputError
        When stages are not dealt to ranks in turn, their replicas differ in number, or
        replicas cannot share the microbatches evenly.
    """
    no_extra_in_flight(choice)
    equal_replicas(choice, topology)
    split_over_replicas(choice, topology, num_minibatches)
    ranks = _dealt(topology)
    replicas = topology.replicas[0]
    minibatch = {
        rank: _order(place, len(ranks), topology.num_stages // len(ranks), r, replicas, choice.microbatches)
        for place, members in enumerate(ranks)
        for r, rank in enumerate(members)
    }
    return flushed(
        choice, topology, num_minibatches, tuple(minibatch[rank] for rank in range(topology.num_ranks))
    )


def _dealt(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of the first P stages, which the others repeat."""
    ranks = topology.ranks
    places = next((s for s in range(1, len(ranks)) if ranks[s] == ranks[0]), len(ranks))
    members = [rank for stage in ranks[:places] for rank in stage]
    wrong = next((s for s in range(len(ranks)) if ranks[s] != ranks[s % places]), None)
    if wrong is not None or len(ranks) % places or len(set(members)) < len(members):
        raise InputError(
            f"schedule 'interleaved' deals {len(ranks)} stages to ranks in turn (0, 1, 2, 0, 1, 2), but the "
            f"plan places them on {', '.join(str(r[0]) for r in ranks)}; plan again for this schedule"
        )
    return ranks[:places]


def _order(
    place: int, num_places: int, num_chunks: int, replica: int, replicas: int, num_microbatches: int
) -> Actions:
    """Return one rank's order; it is made for whole groups of P microbatches, those beyond are left out."""
    num = num_microbatches // replicas
    index = np.arange(-(-num // num_places) * num_places * num_chunks)
    chunk = index // num_places % num_chunks
    number = index // (num_places * num_chunks) * num_places + index % num_places
    microbatch = replica + replicas * number
    forwards = actions(Op.FORWARD, chunk * num_places + place, microbatch)
    backwards = actions(Op.BACKWARD, (num_chunks - 1 - chunk) * num_places + place, microbatch)
    if num_chunks == 1:
        warm = num_places - place - 1
    else:
        warm = 2 * (num_places - place - 1) + (num_chunks - 1) * num_places
    rows = alternate(forwards, backwards, warm + 1)
    return rows[rows[:, 2] < num_microbatches]
