"""What a schedule asks of a plan, refused with the knob, its value and the remedy."""

from __future__ import annotations

from pdmpi.errors import InputError
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.program import Topology

__all__ = [
    "equal_replicas", "no_extra_in_flight", "one_microbatch", "one_stage_a_rank", "split_over_replicas",
    "straight_only", "whole_rounds",
]  # fmt: skip


def one_microbatch(choice: ScheduleChoice) -> None:
    """Refuse a split minibatch where every minibatch steps by itself."""
    if choice.microbatches != 1:
        raise InputError(
            f"schedule.microbatches = {choice.microbatches}: schedule {choice.name!r} steps after every "
            "minibatch; set it to 1, or take '2bw' (accumulates) or '1f1b' (flushes)"
        )


def no_extra_in_flight(choice: ScheduleChoice) -> None:
    """Refuse extra minibatches in flight where the schedule itself says how many there are."""
    if choice.extra_in_flight:
        raise InputError(
            f"schedule.extra_in_flight = {choice.extra_in_flight} means nothing to schedule {choice.name!r}; "
            "set it to 0"
        )


def one_stage_a_rank(choice: ScheduleChoice, topology: Topology) -> None:
    """Refuse a rank that plays several stages."""
    seen: set[int] = set()
    for rank in (rank for stage in topology.ranks for rank in stage):
        if rank in seen:
            raise InputError(
                f"schedule {choice.name!r} plays one stage a rank, but the plan gives rank {rank} several; "
                "take 'interleaved' or 'zb-v', or plan again for this schedule"
            )
        seen.add(rank)


def straight_only(choice: ScheduleChoice, topology: Topology, why: str) -> None:
    """Refuse replicated stages."""
    if max(topology.replicas) > 1:
        raise InputError(f"schedule {choice.name!r} takes no replicas ({_shape(topology)}): {why}")


def equal_replicas(choice: ScheduleChoice, topology: Topology) -> None:
    """Refuse stages of unequal numbers of replicas."""
    if len(set(topology.replicas)) > 1:
        raise InputError(
            f"schedule {choice.name!r} plays several stages a rank, which needs the same number of replicas "
            f"everywhere, not {_shape(topology)}; take '1f1b' or 'pipedream', or plan again for this schedule"
        )


def whole_rounds(num_minibatches: int, topology: Topology) -> None:
    """Refuse a number of minibatches that leaves a replica without its share of a round."""
    if num_minibatches < 1 or num_minibatches % topology.round:
        raise InputError(
            f"{num_minibatches} minibatches do not fill rounds over {_shape(topology)} replicas: take a "
            f"multiple of {topology.round}, {_nearest(num_minibatches, topology.round)}"
        )


def split_over_replicas(choice: ScheduleChoice, topology: Topology, num_minibatches: int) -> None:
    """Refuse microbatches that the replicas of a stage cannot share evenly."""
    problems = []
    if choice.microbatches < 1 or choice.microbatches % topology.round:
        problems.append(
            f"schedule.microbatches = {choice.microbatches} cannot be shared evenly by {_shape(topology)} "
            f"replicas: take a multiple of {topology.round}, {_nearest(choice.microbatches, topology.round)}"
        )
    if num_minibatches < 1:
        problems.append(f"{num_minibatches} minibatches: take at least 1")
    InputError.collect(problems)


def _shape(topology: Topology) -> str:
    return "-".join(map(str, topology.replicas))


def _nearest(number: int, unit: int) -> str:
    below = number // unit * unit
    return f"{below} or {below + unit}" if below > 0 else str(unit)
