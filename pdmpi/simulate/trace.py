"""Timelines as a trace that Perfetto and chrome://tracing open: a process for each rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pdmpi.schedule.program import Kind, Op, Program
from pdmpi.simulate.boxes import boxes
from pdmpi.simulate.timeline import Timeline

__all__ = ["trace_events", "write_trace"]

_MICROSECONDS = 1e6
_COMPUTE_THREAD = 0
_WAITS = {
    Op.WAIT_RECV: "wait for a message",
    Op.WAIT_SEND: "wait until sent",
    Op.WAIT_REDUCE: "wait for allreduce",
}
_KINDS = {Kind.ACTIVATION: "activations", Kind.GRADIENT: "gradients"}
_CONSUMERS = {Kind.ACTIVATION: (Op.FORWARD,), Kind.GRADIENT: (Op.BACKWARD, Op.BACKWARD_INPUT)}


def write_trace(timeline: Timeline, path: Path, *, measured: Timeline | None = None) -> None:
    """Write a timeline as Trace Event JSON; times are microseconds.

    Every rank is a process with a thread for its instructions and one for each peer and kind
    of message that it sends; an arrow leads from a message to the computation that needs it.

    Parameters
    ----------
    timeline
        The prediction.
    path
        The JSON file.
    measured
        A run of the same program, as further processes.
    """
    events = list(trace_events(timeline, 0, "" if measured is None else "predicted "))
    if measured is not None:
        events += trace_events(measured, timeline.program.topology.num_ranks, "measured ")
    document = {"displayTimeUnit": "ms", "traceEvents": events}
    path.write_text(json.dumps(document, separators=(",", ":")) + "\n")


def trace_events(timeline: Timeline, first_process: int, prefix: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a timeline, ranks numbered as processes from ``first_process`` on."""
    program = timeline.program
    for rank in range(program.topology.num_ranks):
        process = first_process + rank
        yield _name("process_name", process, _COMPUTE_THREAD, f"{prefix}{_describe(program, rank)}")
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
        yield _name("thread_name", process, _COMPUTE_THREAD, "instructions")
        yield from _computations(timeline, rank, process)
        yield from _waits(timeline, rank, process)
    yield from _messages(timeline, first_process)


def _computations(timeline: Timeline, rank: int, process: int) -> Iterator[dict[str, Any]]:
    for box in boxes(timeline, rank, 0.0, np.inf):
        if box.op == Op.WAIT_REDUCE:
            continue
        about = {"stage": box.stage, "microbatch": box.microbatch, "version": box.version}
        name = f"{box.op.name.lower().replace('_', ' ')} {box.microbatch}"
        yield _slice(name, box.start_s, box.end_s, process, _COMPUTE_THREAD, about)


def _waits(timeline: Timeline, rank: int, process: int) -> Iterator[dict[str, Any]]:
    rows, starts, ends = timeline.program.rows[rank], timeline.start_s[rank], timeline.end_s[rank]
    for i in np.flatnonzero(np.isin(rows[:, 0], list(_WAITS)) & (ends > starts)).tolist():
        op, stage, microbatch = rows[i, :3].tolist()
        about = {"stage": stage, "microbatch": microbatch}
        yield _slice(_WAITS[Op(op)], float(starts[i]), float(ends[i]), process, _COMPUTE_THREAD, about)


def _messages(timeline: Timeline, first_process: int) -> Iterator[dict[str, Any]]:
    """Yield a slice for each message on its sender, and an arrow to the computation that needs it."""
    program, moves = timeline.program, timeline.transfers
    needed = _consumption(timeline)
    threads: dict[tuple[int, int, Kind], int] = {}
    columns = (
        moves.channel.tolist(), moves.source.tolist(), moves.target.tolist(), moves.microbatch.tolist(),
        moves.start_s.tolist(), moves.end_s.tolist(),
    )  # fmt: skip
    for i, (index, source, target, k, start_s, end_s) in enumerate(zip(*columns, strict=True)):
        channel = program.channels[index]
        stream = (source, target, channel.kind)
        process = first_process + source
        if stream not in threads:
            threads[stream] = 1 + len(threads)
            name = f"{_KINDS[channel.kind]} to rank {target}"
            yield _name("thread_name", process, threads[stream], name)
        about = {"microbatch": k, "from_stage": channel.source_stage, "to_stage": channel.target_stage}
        yield _slice(f"{_KINDS[channel.kind]} {k}", start_s, end_s, process, threads[stream], about)
        consumed_s = needed.get((target, channel.kind, channel.target_stage, k))
        if consumed_s is not None:
            arrow = {"name": "message", "cat": "message", "id": first_process + i}
            begin = {"ph": "s", "ts": start_s * _MICROSECONDS, "pid": process, "tid": threads[stream]}
            end = {
                "ph": "f", "bp": "e", "ts": consumed_s * _MICROSECONDS, "pid": first_process + target,
                "tid": _COMPUTE_THREAD,
            }  # fmt: skip
            yield arrow | begin
            yield arrow | end


def _consumption(timeline: Timeline) -> dict[tuple[int, Kind, int, int], float]:
    """Return when each message's computation starts, by rank, kind, stage and microbatch."""
    found = {}
    for rank, rows in enumerate(timeline.program.rows):
        for kind, ops in _CONSUMERS.items():
            at = np.flatnonzero(np.isin(rows[:, 0], ops))
            starts = timeline.start_s[rank][at].tolist()
            for (stage, k), start in zip(rows[at, 1:3].tolist(), starts, strict=True):
                found[rank, kind, stage, k] = start
    return found


def _describe(program: Program, rank: int) -> str:
    ranks = program.topology.ranks
    played = [f"stage {s} replica {own.index(rank)}" for s, own in enumerate(ranks) if rank in own]
    return f"rank {rank}: {', '.join(played)}"


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(
    name: str, start_s: float, end_s: float, process: int, thread: int, about: dict[str, int]
) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "ts": start_s * _MICROSECONDS, "dur": (end_s - start_s) * _MICROSECONDS,
        "pid": process, "tid": thread, "args": about,
    }  # fmt: skip
