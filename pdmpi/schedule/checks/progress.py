"""Sends and receives pair up in order, and every rank comes to its end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pdmpi.schedule.execution import Execution, execute
from pdmpi.schedule.matching import NOBODY, streams
from pdmpi.schedule.program import Instruction, Op, Program, Rows
from pdmpi.schedule.violation import Fault, Violation

__all__ = ["check_deadlock", "check_order", "check_reduction_order"]


def check_order(program: Program) -> Iterator[Violation]:
    """Yield, for each channel between two ranks, the first send that its receive is not posted for."""
    sends, receives = streams(program, Op.POST_SEND), streams(program, Op.POST_RECV)
    empty = np.empty(0, np.int64)
    for stream in sorted({*sends, *receives}):
        sent_at, received_at = sends.get(stream, empty), receives.get(stream, empty)
        sent = program.rows[stream.source][sent_at, 2]
        received = program.rows[stream.target][received_at, 2]
        both = min(len(sent), len(received))
        differs = np.flatnonzero(sent[:both] != received[:both])
        where = f"channel {stream.channel} from rank {stream.source} to rank {stream.target}"
        if len(differs):
            i = int(differs[0])
            yield Violation(
                Fault.ORDER, stream.target, int(received_at[i]),
                f"{where}: message {i} is microbatch {sent[i]} where it is sent, {received[i]} where it "
                "is received",
            )  # fmt: skip
        elif len(sent) != len(received):
            yield Violation(
                Fault.ORDER, stream.target, -1,
                f"{where}: {len(sent)} sends, {len(received)} receives",
            )  # fmt: skip


def check_reduction_order(program: Program) -> Iterator[Violation]:
    """Yield reductions over the same ranks that these post in different order.

    Sums over one set of ranks share a communicator, where only order tells them apart.
    """
    together: dict[tuple[int, ...], list[int]] = {}
    for index, group in enumerate(program.groups):
        together.setdefault(group.ranks, []).append(index)
    for ranks, groups in together.items():
        if len(groups) == 1:
            continue
        posts = [_posts(program.rows[rank], groups) for rank in ranks]
        for rank, at in zip(ranks[1:], posts[1:], strict=True):
            first, other = program.rows[ranks[0]][posts[0], 2:4], program.rows[rank][at, 2:4]
            both = min(len(first), len(other))
            differs = np.flatnonzero((first[:both] != other[:both]).any(axis=1))
            if len(differs):
                (k, group), row = first[differs[0]].tolist(), int(at[differs[0]])
                due = f"group {group} up to microbatch {k}"
                yield Violation(Fault.ORDER, rank, row, f"rank {ranks[0]} posts the reduction of {due} here")


def _posts(rows: Rows, groups: list[int]) -> NDArray[np.int64]:
    return np.flatnonzero((rows[:, 0] == Op.POST_REDUCE) & np.isin(rows[:, 3], groups))


def check_deadlock(program: Program) -> Iterator[Violation]:
    """Yield the ranks that wait for each other for ever."""
    execution = execute(program, rendezvous=True)
    blocked = execution.blocked
    if not blocked:
        return
    eager = execute(program, rendezvous=False).blocked
    when = "whatever the size of messages" if eager else "once messages are too large for eager sends"
    for rank, row in _cycle(execution).items():
        text = _reason(execution, rank)
        yield Violation(Fault.DEADLOCK, rank, row, f"waits for ever for {text}; {when}")


def _cycle(execution: Execution) -> dict[int, int]:
    """Return the blocked ranks that lie on a circle of waits or wait for what nobody does."""
    blocked = execution.blocked
    found: dict[int, int] = {}
    settled: set[int] = set()
    for start in blocked:
        path: list[int] = []
        rank: int | None = start
        while rank is not None and rank in blocked and rank not in settled and rank not in path:
            path.append(rank)
            rank = _awaited(execution, rank)
        if rank in path:
            found.update({r: blocked[r] for r in path[path.index(rank) :]})
        elif path and (rank is None or rank not in blocked):
            found[path[-1]] = blocked[path[-1]]
        settled.update(path)
    return found


def _awaited(execution: Execution, rank: int) -> int | None:
    """Return the rank that a blocked rank waits for."""
    i = execution.done[rank]
    peer = int(execution.matching.peer[rank][i])
    if peer >= 0 or peer == NOBODY:
        return peer if peer >= 0 else None
    number = int(execution.matching.need[rank][i])
    for member in execution.program.groups[-1 - peer].ranks:
        theirs = np.flatnonzero(execution.matching.peer[member] == peer)
        if number >= len(theirs) or execution.done[member] < theirs[number]:
            return member
    return None


def _reason(execution: Execution, rank: int) -> str:
    peer = _awaited(execution, rank)
    row = execution.blocked.get(peer) if peer is not None else None
    if peer is None or row is None:
        return f"rank {peer}, which ends without it"
    return f"rank {peer}, which waits in {Instruction.from_row(execution.program.rows[peer][row].tolist())}"
