"""ZB-V: two stages a rank, laid out as a V, backward in two parts (Qi et al., NeurIPS 2024, section 3).

Of 2P stages, rank p plays p and 2P - 1 - p, so the last stage is where the first one is and
a microbatch's backward starts on the rank that its forward started on.  With equal parts
nothing is idle between the first forward and the last ``W`` of a rank, at 1F1B's memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pdmpi.errors import InputError
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.by_rank import flushed
from pdmpi.schedule.order import Actions, Order, parse_actions
from pdmpi.schedule.program import Topology
from pdmpi.schedule.rules import equal_replicas, no_extra_in_flight, split_over_replicas

__all__ = ["zb_v"]


def zb_v(choice: ScheduleChoice, topology: Topology, num_minibatches: int) -> Order:
    """Return ZB-V's order.

    Raises
    ------
    InputError
        When the stages are not laid out as a V, their replicas differ in number, or replicas
        cannot share the microbatches evenly.
    """
    no_extra_in_flight(choice)
    equal_replicas(choice, topology)
    split_over_replicas(choice, topology, num_minibatches)
    ranks = topology.ranks
    half = len(ranks) // 2
    members = [rank for stage in ranks[:half] for rank in stage]
    if len(ranks) % 2 or ranks != ranks[::-1] or len(set(members)) < len(members):
        raise InputError(
            f"schedule 'zb-v' lays {len(ranks)} stages out as a V over ranks (0, 1, 1, 0), but the plan "
            f"places them on {', '.join(str(r[0]) for r in ranks)}; plan again for this schedule"
        )
    replicas = topology.replicas[0]
    minibatch = {
        rank: _order(place, half, r, replicas, choice.microbatches)
        for place, stage in enumerate(ranks[:half])
        for r, rank in enumerate(stage)
    }
    return flushed(
        choice, topology, num_minibatches, tuple(minibatch[rank] for rank in range(topology.num_ranks))
    )


def _order(place: int, half: int, replica: int, replicas: int, num_microbatches: int) -> Actions:
    """Return one rank's order; it is made for at least 2P microbatches, those beyond are left out."""
    num = num_microbatches // replicas
    stage = {"down": place, "up": 2 * half - 1 - place}
    count: Counter[str] = Counter()
    words = []
    for step in _steps(place, half, max(num, 2 * half)):
        leg, letter = step.split()
        if count[step] < num:
            words.append(f"{stage[leg]}{letter}{replica + replicas * count[step]}")
        count[step] += 1
    return parse_actions(" ".join(words))


def _steps(place: int, half: int, num: int) -> Iterator[str]:
    """Yield leg of the V and part of each step; the microbatches of every kind of step come in turn."""
    warm = 2 * (half - place) - 1
    yield from ["down F"] * warm
    yield from ["up F", "down F"] * place
    yield from ["up F", "up I", "up W"] * (half - place)
    down, up = warm + place, half
    while up < num:
        if down < num:
            yield "down F"
            down += 1
        yield from ("down I", "down W", "up F", "up I", "up W")
        up += 1
    yield from ["down I", "up I"] * place
    yield from ["down I", "down W"] * (half - place)
    yield from ["up W"] * place
    yield from ["down W"] * place
