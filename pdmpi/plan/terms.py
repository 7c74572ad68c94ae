"""What a schedule asks of one stage: versions, microbatches in flight, microbatches per update.

This is the closed form of each schedule as the planner costs it; the program that really
runs is made by the schedule room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdmpi.errors import InputError, nearest
from pdmpi.plan.plan import ScheduleChoice

__all__ = ["SCHEDULES", "Terms", "terms_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a schedule uses a stage.

    Attributes
    ----------
    versions
        Weight versions at most; None when as many as the in-flight depth.
    synchronised
        Whether every stage uses the versions of the input stage, and holds as many minibatches' worth.
    flushes
        Whether the pipeline drains before every update.
    holds_all
        Whether all microbatches of an update are in flight before the first backward (GPipe).
    accumulates
        Whether an update averages ``microbatches`` gradients, rather than one of each replica.
    straight
        Whether every stage has one replica.
    single_stage
        Whether there is one stage.
    splits_backward
        Whether gradients of the inputs and of the parameters are computed apart.
    even_depth
        Whether every stage holds at least as many microbatches as the input stage (ZB-H1's parameter
        gradients wait).
    """

    versions: int | None = 1
    synchronised: bool = False
    flushes: bool = True
    holds_all: bool = False
    accumulates: bool = True
    straight: bool = False
    single_stage: bool = False
    splits_backward: bool = False
    even_depth: bool = False

    def microbatches_per_update(self, microbatches: int, replicas: int) -> float:
        """Return the microbatches of which a replica averages the gradients, before it updates.

        Parameters
        ----------
        microbatches
            Of the schedule.
        replicas
            Of the stage.
        """
        return max(microbatches / replicas, 1.0) if self.accumulates else 1.0


SCHEDULES: Mapping[str, Terms] = {
    "pipedream": Terms(versions=None, flushes=False, accumulates=False),
    "pipedream-vsync": Terms(versions=None, synchronised=True, flushes=False, accumulates=False),
    "2bw": Terms(versions=2, flushes=False),
    "gpipe": Terms(holds_all=True),
    "1f1b": Terms(),
    "interleaved": Terms(straight=True),
    "zb-h1": Terms(splits_backward=True, even_depth=True),
    "zb-v": Terms(straight=True, splits_backward=True),
    "data-parallel": Terms(accumulates=False, single_stage=True),
    "model-parallel": Terms(accumulates=False, straight=True),
}
"""Every schedule by name."""


def terms_of(choice: ScheduleChoice) -> Terms:
    """Return the terms of a schedule.

    Raises
    ------
    InputError
        No schedule has that name.
    """
    if choice.name not in SCHEDULES:
        raise InputError(f"schedule {choice.name!r} is unknown{nearest(choice.name, SCHEDULES)}")
    return SCHEDULES[choice.name]
