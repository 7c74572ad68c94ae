"""What a schedule asks of a plan, refused with the knob, its value and the remedy."""

from __future__ import annotations

import math

from pdmpi.errors import InputError
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.program import Topology

__all__ = ["one_microbatch", "one_stage_a_rank", "split_over_replicas", "straight_only", "whole_rounds"]


def one_microbatch(choice: ScheduleChoice) -> None:
    """Refuse a split minibatch where every minibatch steps by itself."""
    if choice.microbatches != 1:
        raise InputError(
            f"schedule.microbatches = {choice.microbatches}: schedule {choice.name!r} steps after every "
            "minibatch; set it to 1, or take '2bw' (accumulates) or '1f1b' (flushes)"
        )


def one_stage_a_rank(choice: ScheduleChoice, topology: Topology) -> None:
    """Refuse a rank that plays several stages."""
    ranks = [rank for stage in topology.ranks for rank in stage]
    twice = (
        next((rank for rank in ranks if ranks.count(rank) > 1), None)
        if len(set(ranks)) < len(ranks)
        else None
    )
    if twice is not None:
        raise InputError(
            f"schedule {choice.name!r} plays one stage a rank, but the plan gives rank {twice} several; "
            "take 'interleaved' or 'zb-v', or plan again for this schedule"
        )


def whole_rounds(num_minibatches: int, topology: Topology) -> None:
    """Refuse a number of minibatches that leaves a replica without its share of a round."""
    replicas = [len(ranks) for ranks in topology.ranks]
    unit = math.lcm(*replicas)
    below = num_minibatches // unit * unit
    if num_minibatches < 1 or below != num_minibatches:
        fits = f"{below} or {below + unit}" if below else str(unit)
        raise InputError(
            f"{num_minibatches} minibatches do not fill rounds over {'-'.join(map(str, replicas))} replicas: "
            f"take a multiple of {unit}, {fits}"
        )


def split_over_replicas(choice: ScheduleChoice, topology: Topology, num_minibatches: int) -> None:
    """Refuse microbatches that the replicas of a stage cannot share evenly."""
    replicas = [len(ranks) for ranks in topology.ranks]
    unit = math.lcm(*replicas)
    below = choice.microbatches // unit * unit
    problems = []
    if below != choice.microbatches:
        fits = f"{below} or {below + unit}" if below else str(unit)
        problems.append(
            f"schedule.microbatches = {choice.microbatches} cannot be shared by "
            f"{'-'.join(map(str, replicas))} replicas: take a multiple of {unit}, {fits}"
        )
    if num_minibatches < 1:
        problems.append(f"{num_minibatches} minibatches: take at least 1")
    InputError.collect(problems)


def straight_only(choice: ScheduleChoice, topology: Topology, why: str) -> None:
    """Refuse replicated stages."""
    counts = [len(ranks) for ranks in topology.ranks]
    if max(counts) > 1:
        raise InputError(
            f"schedule {choice.name!r} takes no replicated stages ({'-'.join(map(str, counts))}): {why}"
        )
