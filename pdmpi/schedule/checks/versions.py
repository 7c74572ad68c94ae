"""Weight versions are there when they are used, and updates average exactly their microbatches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pdmpi.schedule.checks.part import Part
from pdmpi.schedule.program import ALL_STAGES, OPERANDS, Op, Program
from pdmpi.schedule.violation import Fault, Violation

__all__ = ["check_joint_updates", "check_updates", "check_versions"]

Indices = NDArray[np.int64]

_USERS = (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


def check_versions(part: Part) -> Iterator[Violation]:
    """Yield uses of a version that its slot does not hold, and backwards on other weights."""
    forward = part.forward
    for op in _USERS[1:]:
        user = part.located(op)
        bad = forward.there & user.there & (forward["version"] != user["version"])
        for i in np.flatnonzero(bad).tolist():
            yield Violation(
                Fault.VERSION, part.rank, int(user.row[i]),
                f"{op.name} of microbatch {part.microbatches[i]} uses version {user['version'][i]}, "
                f"its forward used {forward['version'][i]}",
            )  # fmt: skip
    used = np.concatenate([part.at(op) for op in _USERS])
    updates = part.at(Op.UPDATE)
    column = 3 + OPERANDS[Op.FORWARD].index("version")
    rows = part.rows
    yield from _held(part, used, rows[used, column + 1], rows[used, column])
    yield from _held(part, updates, rows[updates, column + 1], rows[updates, column] - 1)


def _held(part: Part, at: Indices, slot: Indices, version: Indices) -> Iterator[Violation]:
    """Yield the rows ``at`` whose slot holds another version then."""
    updates = part.at(Op.UPDATE)
    span = len(part.rows) + 1
    written_slot = np.append(0, part.rows[updates, 5]).astype(np.int64)
    written = np.append(0, part.rows[updates, 3])
    key = written_slot * span + np.append(-1, updates) + 1
    order = np.argsort(key)
    found = np.searchsorted(key[order], slot.astype(np.int64) * span + at, side="right") - 1
    latest = order[np.maximum(found, 0)]
    filled = (found >= 0) & (written_slot[latest] == slot)
    held = np.where(filled, written[latest], -1)
    for i in np.flatnonzero(held != version).tolist():
        state = f"holds version {held[i]}" if held[i] >= 0 else "is empty"
        yield Violation(
            Fault.VERSION, part.rank, int(at[i]),
            f"needs version {version[i]} of stage {part.stage} in weight slot {slot[i]}, which {state}",
        )  # fmt: skip


def check_updates(part: Part) -> Iterator[Violation]:
    """Yield updates that do not follow exactly their microbatches and, on replicas, one reduction."""
    per_update = part.program.microbatches_per_update[part.stage]
    updates = part.at(Op.UPDATE)
    due = part.program.num_microbatches // per_update if per_update else 0

    def wrong(row: int, message: str) -> Violation:
        return Violation(Fault.UPDATE, part.rank, row, message)

    if len(updates) != due:
        yield wrong(-1, f"stage {part.stage} has {len(updates)} updates, not {due}")
    last = part.last_use
    for number, row in enumerate(updates[:due].tolist()):
        version, end = int(part.rows[row, 3]), (number + 1) * per_update
        if version != number + 1:
            yield wrong(row, f"update {number + 1} of stage {part.stage} makes version {version}")
        if part.rows[row, 2] != end - 1:
            yield wrong(row, f"names microbatch {part.rows[row, 2]} as its last, which is {end - 1}")
    ends = np.arange(1, len(updates) + 1) * (per_update or 1)
    window = part.microbatches // (per_update or 1)
    own = last.there & (window < len(updates))
    update = updates[window[own]] if len(updates) else np.empty(0, np.int64)
    row, k = last.row[own], part.microbatches[own]
    for i in np.flatnonzero(row > update).tolist():
        yield wrong(int(update[i]), f"update misses the gradients of microbatch {k[i]}")
    previous = np.append(-1, updates)[window[own]] if len(updates) else update
    for i in np.flatnonzero(row < previous).tolist():
        yield wrong(int(previous[i]), f"update includes microbatch {k[i]}, which belongs to the next")
    yield from _reductions(part, updates, ends)


def _over_replicas(part: Part, op: Op) -> Indices:
    at = part.at(op)
    gradients = np.array([group.sums_gradients for group in part.program.groups], bool)
    found: Indices = at[gradients[part.rows[at, 3]]] if len(at) else at
    return found


def _reductions(part: Part, updates: Indices, ends: Indices) -> Iterator[Violation]:
    posts, waits = (_over_replicas(part, op) for op in (Op.POST_REDUCE, Op.WAIT_REDUCE))
    due = len(updates) if part.num_replicas > 1 else 0
    for op, at in ((Op.POST_REDUCE, posts), (Op.WAIT_REDUCE, waits)):
        if len(at) != due:
            text = f"stage {part.stage} has {len(at)} of {op.name} for {due} updates over replicas"
            yield Violation(Fault.UPDATE, part.rank, -1, text)
        for row in at.tolist():
            if part.program.groups[part.rows[row, 3]].stage != part.stage:
                yield Violation(Fault.UPDATE, part.rank, row, "reduces over the replicas of another stage")
    if len(posts) != due or len(waits) != due:
        return
    computed = np.sort(part.last_use.row)
    previous = np.append(-1, updates)[:due]
    for op, at in ((Op.POST_REDUCE, posts), (Op.WAIT_REDUCE, waits)):
        for i in np.flatnonzero(part.rows[at, 2] != ends[:due] - 1).tolist():
            text = f"{op.name} names microbatch {part.rows[at[i], 2]}, its update ends at {ends[i] - 1}"
            yield Violation(Fault.UPDATE, part.rank, int(at[i]), text)
    between = np.searchsorted(computed, waits) - np.searchsorted(computed, posts)
    bad = (between != 1) | (posts < previous) | (waits > updates[:due]) | (waits < posts)
    after = np.searchsorted(computed, updates[:due]) - np.searchsorted(computed, waits)
    for i in np.flatnonzero(bad | (after > 0)).tolist():
        text = "reduction does not span exactly the last backward before its update"
        yield Violation(Fault.UPDATE, part.rank, int(posts[i]), text)


def check_joint_updates(program: Program) -> Iterator[Violation]:
    """Yield joint updates that do not follow, on each rank, one sum over all stages and what it computes."""
    joint = next((i for i, group in enumerate(program.groups) if group.stage == ALL_STAGES), None)
    if joint is None:
        return
    due = program.num_microbatches // max(1, *program.microbatches_per_update)
    for rank, rows in enumerate(program.rows):
        op = rows[:, 0]
        updates = np.flatnonzero(op == Op.UPDATE)
        computed = np.flatnonzero(np.isin(op, _USERS))
        sums = [
            np.flatnonzero((op == which) & (rows[:, 3] == joint))
            for which in (Op.POST_REDUCE, Op.WAIT_REDUCE)
        ]
        if [len(at) for at in sums] != [due, due]:
            counts = " and ".join(str(len(at)) for at in sums)
            text = f"{counts} posts and waits of the sum over all stages for {due} updates"
            yield Violation(Fault.UPDATE, rank, -1, text)
            continue
        posts, waits = sums
        for number, (post, wait) in enumerate(zip(posts.tolist(), waits.tolist(), strict=True), start=1):
            own = updates[rows[updates, 3] == number]
            rest = computed[(computed > post) & (computed < own.max(initial=post))]
            if (own < wait).any() or wait < post or len(rest):
                text = f"the sum over all stages does not stand right before update {number}"
                yield Violation(Fault.UPDATE, rank, post, text)
