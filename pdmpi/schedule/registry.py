"""The schedules by name, and the one way from a choice to a program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import cast, get_args

from pdmpi.errors import InputError, nearest
from pdmpi.plan.plan import Plan, ScheduleChoice
from pdmpi.schedule.lane import Recompute
from pdmpi.schedule.lower import lower
from pdmpi.schedule.order import Order
from pdmpi.schedule.pipedream import pipedream
from pdmpi.schedule.program import Program, Topology
from pdmpi.schedule.topology import topology_of

__all__ = ["SCHEDULES", "Generator", "generate", "program_of"]

Generator = Callable[[ScheduleChoice, Topology, int], Order]
"""``generator(choice, topology, num_minibatches)``: the order of every rank's computations."""

SCHEDULES: Mapping[str, Generator] = MappingProxyType(
    {
        "pipedream": pipedream,
    }
)
"""Every schedule by its name in ``[schedule]``."""


def generate(
    choice: ScheduleChoice,
    topology: Topology,
    num_minibatches: int,
    recompute_stages: Collection[int] = (),
) -> Program:
    """Return the program of a schedule.

    Parameters
    ----------
    choice
        Name and parameters.
    topology
        Stages, ranks and edges.
    num_minibatches
        Minibatches that the program trains; each is ``choice.microbatches`` microbatches.
    recompute_stages
        Stages that recompute their activations even where ``choice.recompute`` keeps them.

    Raises
    ------
    InputError
        For an unknown name, or a shape that the schedule does not take.
    """
    if choice.name not in SCHEDULES:
        raise InputError(f"schedule.name = {choice.name!r} is unknown{nearest(choice.name, SCHEDULES)}")
    if choice.recompute not in get_args(Recompute):
        known = nearest(choice.recompute, get_args(Recompute))
        raise InputError(f"schedule.recompute = {choice.recompute!r} is unknown{known}")
    order = SCHEDULES[choice.name](choice, topology, num_minibatches)
    return lower(order, cast(Recompute, choice.recompute), recompute_stages)


def program_of(plan: Plan, num_minibatches: int) -> Program:
    """Return the program of a plan: its schedule, its topology, its stages' recomputation."""
    recompute = [s for s, stage in enumerate(plan.stages) if stage.recompute]
    return generate(plan.schedule, topology_of(plan), num_minibatches, recompute)
