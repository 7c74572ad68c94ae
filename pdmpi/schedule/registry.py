"""The schedules by name, and the one way from a choice to a program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import cast, get_args

from pdmpi.errors import InputError, nearest
from pdmpi.plan.plan import Plan, ScheduleChoice
from pdmpi.schedule.data_parallel import data_parallel
from pdmpi.schedule.double_buffered import double_buffered
from pdmpi.schedule.flushed_1f1b import flushed_1f1b
from pdmpi.schedule.gpipe import gpipe
from pdmpi.schedule.interleaved import interleaved
from pdmpi.schedule.lane import Recompute
from pdmpi.schedule.lower import lower
from pdmpi.schedule.model_parallel import model_parallel
from pdmpi.schedule.order import Order
from pdmpi.schedule.pipedream import pipedream
from pdmpi.schedule.program import Program, Topology
from pdmpi.schedule.topology import topology_of
from pdmpi.schedule.vertical_sync import vertical_sync
from pdmpi.schedule.zb_h1 import zb_h1
from pdmpi.schedule.zb_v import zb_v

__all__ = ["SCHEDULES", "Generator", "generate", "program_of"]

Generator = Callable[[ScheduleChoice, Topology, int], Order]
"""``generator(choice, topology, num_minibatches)``: the order of every rank's computations."""

SCHEDULES: Mapping[str, Generator] = MappingProxyType(
    {
        "pipedream": pipedream,
        "pipedream-vsync": vertical_sync,
        "2bw": double_buffered,
        "gpipe": gpipe,
        "1f1b": flushed_1f1b,
        "interleaved": interleaved,
        "zb-h1": zb_h1,
        "zb-v": zb_v,
        "data-parallel": data_parallel,
        "model-parallel": model_parallel,
    }
)
"""Every schedule by its name in ``[schedule]``."""


def generate(
    choice: ScheduleChoice,
    topology: Topology,
    num_minibatches: int,
    recompute_stages: Collection[int] = (),
    *,
    joint_updates: bool = False,
    joint_statistics: Collection[int] = (),
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
    joint_updates
        Whether every update waits for a sum over all stages (of gradient norms); only where all flush.
    joint_statistics
        Stages whose replicas run each forward and backward together (batch normalisation over them).

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
    return lower(
        order, cast(Recompute, choice.recompute), recompute_stages,
        joint_updates=joint_updates, joint_statistics=joint_statistics,
    )  # fmt: skip


def program_of(
    plan: Plan, num_minibatches: int, *, joint_updates: bool = False, joint_statistics: Collection[int] = ()
) -> Program:
    """Return the program of a plan: its schedule, its topology, its stages' recomputation."""
    recompute = [s for s, stage in enumerate(plan.stages) if stage.recompute]
    return generate(
        plan.schedule, topology_of(plan), num_minibatches, recompute,
        joint_updates=joint_updates, joint_statistics=joint_statistics,
    )  # fmt: skip
