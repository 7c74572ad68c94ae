"""What a timeline says: throughput, utilisation, in-flight depth; and the memory its program needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdmpi.schedule.program import NO_SLOT, OPERANDS, Kind, Op, Program, Rows
from pdmpi.simulate.costs import Costs
from pdmpi.simulate.timeline import Floats, Timeline

__all__ = ["BACKWARDS", "COMPUTE", "RankReport", "Report", "completions", "memory_of", "summarise"]

COMPUTE = (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.UPDATE)
"""Operations that keep a device busy."""
BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT)
"""Operations that end a microbatch's flight on a stage."""

_SAVED_AT = 3 + OPERANDS[Op.FORWARD].index("saved")
_KEPT_BY = 3 + OPERANDS[Op.RECOMPUTE].index("saved")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank.

    Attributes
    ----------
    rank, stages
        Which it is and what it plays.
    busy_s, idle_s
        Seconds that its device computes, and the rest of the program's duration.
    utilisation
        Busy fraction of the steady state (of the whole, where there is none).
    in_flight
        Most microbatches between their forward and their backward, on any of its stages.
    memory_bytes
        Peak bytes.
    memory_parts
        The same, by what they are for.
    """

    rank: int
    stages: tuple[int, ...]
    busy_s: float
    idle_s: float
    utilisation: float
    in_flight: int
    memory_bytes: int
    memory_parts: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole timeline.

    Attributes
    ----------
    num_microbatches
        Microbatches that went through.
    duration_s
        Seconds from the first instruction to the last.
    steady_from_s, steady_to_s
        The steady state: whole updates, neither filling nor draining; equal where the program
        is too short to have one.
    period_s
        Seconds a microbatch in the steady state (of the whole, where there is none).
    microbatches_per_s, samples_per_s
        One over the period; times the microbatch's size.
    overall_microbatches_per_s, overall_samples_per_s
        The same with filling and draining counted.
    ranks
        One entry a rank.
    """

    num_microbatches: int
    duration_s: float
    steady_from_s: float
    steady_to_s: float
    period_s: float
    microbatches_per_s: float
    samples_per_s: float
    overall_microbatches_per_s: float
    overall_samples_per_s: float
    ranks: tuple[RankReport, ...]


def summarise(timeline: Timeline, costs: Costs, microbatch_size: int = 1) -> Report:
    """Return what a timeline says.

    Parameters
    ----------
    timeline
        Predicted or measured.
    costs
        Bytes of each stage, for memory.
    microbatch_size
        Samples of a microbatch.
    """
    program = timeline.program
    duration = timeline.duration_s
    depth = max((_in_flight(rows) for rows in program.rows), default=0)
    begin, end, count = _steady(program, completions(timeline), depth)
    period = (end - begin) / count if count else duration / program.num_microbatches
    rate = 1.0 / period if period else math.inf
    overall = program.num_microbatches / duration if duration else math.inf
    window = (begin, end) if count else (0.0, duration)
    ranks = []
    for rank, rows in enumerate(program.rows):
        busy = np.isin(rows[:, 0], COMPUTE)
        starts, ends = timeline.start_s[rank][busy], timeline.end_s[rank][busy]
        total = float((ends - starts).sum())
        inside = float((np.clip(ends, *window) - np.clip(starts, *window)).sum())
        parts = memory_of(program, rank, costs)
        ranks.append(
            RankReport(
                rank=rank,
                stages=tuple(s for s, own in enumerate(program.topology.ranks) if rank in own),
                busy_s=total,
                idle_s=duration - total,
                utilisation=inside / (window[1] - window[0]) if window[1] > window[0] else 0.0,
                in_flight=_in_flight(rows),
                memory_bytes=sum(parts.values()),
                memory_parts=parts,
            )
        )
    return Report(
        num_microbatches=program.num_microbatches,
        duration_s=duration,
        steady_from_s=begin,
        steady_to_s=end,
        period_s=period,
        microbatches_per_s=rate,
        samples_per_s=rate * microbatch_size,
        overall_microbatches_per_s=overall,
        overall_samples_per_s=overall * microbatch_size,
        ranks=tuple(ranks),
    )


def completions(timeline: Timeline) -> Floats:
    """Return when the last computation of each microbatch ends; shape (microbatches,)."""
    found = np.zeros(timeline.program.num_microbatches)
    for rows, ends in zip(timeline.program.rows, timeline.end_s, strict=True):
        computes = np.isin(rows[:, 0], COMPUTE) & (rows[:, 0] != Op.UPDATE)
        np.maximum.at(found, rows[computes, 2], ends[computes])
    return found


def _steady(program: Program, completed: Floats, depth: int) -> tuple[float, float, int]:
    """Return begin, end and number of microbatches of the steady state; zeros if there is none."""
    unit = math.lcm(*(count for count in program.microbatches_per_update if count), 1)
    rounds = len(completed) // unit
    ended = completed[: rounds * unit].reshape(rounds, unit).max(axis=1, initial=0.0)
    skipped = -(-depth // unit)
    first, last = skipped - 1, rounds - 1 - skipped
    if first < 0 or last <= first:
        return 0.0, 0.0, 0
    first = max(first, min(rounds // 3, last - 1))  # transients last longer than filling
    return float(ended[first]), float(ended[last]), (last - first) * unit


def _in_flight(rows: Rows) -> int:
    """Return the most microbatches that any stage of a rank holds between forward and backward."""
    op, stage = rows[:, 0], rows[:, 1]
    ends = np.isin(op, BACKWARDS)
    most = 0
    for s in np.unique(stage[ends]):
        own = stage == s
        change = ((op == Op.FORWARD) & own).astype(np.int64) - (ends & own)
        most = max(most, int(np.cumsum(change).max()))
    return most


def memory_of(program: Program, rank: int, costs: Costs) -> dict[str, int]:
    """Return the peak bytes of a rank, by what they are for.

    Weight versions and boundary buffers are slots of the program, there from start to end;
    what autograd saves is counted where most of it is alive, or, where CUDA graphs hold it, once a saved
    slot; a replicated stage holds its gradients twice (in the buckets that are summed); layers that are
    not trained have one version.
    """
    rows = program.rows[rank]
    parts = dict.fromkeys(
        ("weights", "gradients", "optimizer_state", "buffers", "saved", "graphs", "slots", "workspace"), 0
    )
    if not costs.graphed:
        parts["saved"] = int(_saved(rows, costs).max(initial=0))
    grouped = {group.stage for group in program.groups if rank in group.ranks and group.sums_gradients}
    for s, own in enumerate(program.topology.ranks):
        if rank not in own:
            continue
        stage, slots = costs.stages[s], program.slots[s]
        frozen = stage.parameter_bytes - stage.gradient_bytes
        parts["weights"] += frozen + slots.weights * stage.gradient_bytes
        parts["gradients"] += stage.gradient_bytes * (2 if s in grouped else 1)
        parts["optimizer_state"] += stage.state_bytes
        parts["buffers"] += stage.buffer_bytes
        if costs.graphed:
            parts["saved"] += stage.saved_bytes * slots.saved
            parts["graphs"] += stage.graph_bytes * slots.saved
        parts["workspace"] = max(parts["workspace"], stage.workspace_bytes)
        for channel, nbytes in costs.message_bytes.items():
            forward = channel.kind == Kind.ACTIVATION
            if channel.target_stage == s:
                parts["slots"] += nbytes * (slots.input if forward else slots.grad_in)
            if channel.source_stage == s:
                parts["slots"] += nbytes * (slots.output if forward else slots.grad_out)
    parts["workspace"] += costs.library_bytes
    return parts


def _saved(rows: Rows, costs: Costs) -> NDArray[np.int64]:
    """Return the bytes that autograd holds after each row."""
    op = rows[:, 0]
    nbytes = np.array([stage.saved_bytes for stage in costs.stages], np.int64)[rows[:, 1]]
    taken = ((op == Op.FORWARD) & (rows[:, _SAVED_AT] != NO_SLOT)) | (
        (op == Op.RECOMPUTE) & (rows[:, _KEPT_BY] != NO_SLOT)
    )
    given = (op == Op.BACKWARD) | (op == Op.BACKWARD_WEIGHT)
    return np.cumsum(nbytes * taken.astype(np.int64) - nbytes * given)
