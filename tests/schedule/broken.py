"""Programs that are broken, one of every kind, and what the checker must say of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from shapes import loop, straight

from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.check import violations
from pdmpi.schedule.program import OPERANDS, Group, Op, Program, Topology
from pdmpi.schedule.registry import generate
from pdmpi.schedule.violation import Fault, Violation


def program_of(name: str, *replicas: int, number: int = 4, microbatches: int = 1, **choice) -> Program:
    chosen = ScheduleChoice(name=name, microbatches=microbatches, **choice)
    return generate(chosen, straight(*replicas), number)


def row_of(program: Program, rank: int, op: Op, k: int, channel: int | None = None) -> int:
    rows = program.rows[rank]
    found = (rows[:, 0] == op) & (rows[:, 2] == k)
    if channel is not None:
        found &= rows[:, 3] == channel
    return int(np.flatnonzero(found)[0])


def with_rows(program: Program, rank: int, rows: np.ndarray) -> Program:
    return dataclasses.replace(
        program, rows=tuple(rows if r == rank else p for r, p in enumerate(program.rows))
    )


def without(program: Program, rank: int, row: int) -> Program:
    return with_rows(program, rank, np.delete(program.rows[rank], row, axis=0))


def twice(program: Program, rank: int, row: int) -> Program:
    rows = program.rows[rank]
    return with_rows(program, rank, np.insert(rows, row, rows[row], axis=0))


def moved(program: Program, rank: int, row: int, to: int) -> Program:
    rows = np.delete(program.rows[rank], row, axis=0)
    return with_rows(program, rank, np.insert(rows, to, program.rows[rank][row], axis=0))


def changed(program: Program, rank: int, row: int, operand: str, value: int) -> Program:
    rows = program.rows[rank].copy()
    rows[row, 3 + OPERANDS[Op(int(rows[row, 0]))].index(operand)] = value
    return with_rows(program, rank, rows)


def swapped(program: Program, rank: int, a: int, b: int) -> Program:
    rows = program.rows[rank].copy()
    rows[[a, b]] = rows[[b, a]]
    return with_rows(program, rank, rows)


def lacks_a_forward():
    p = program_of("pipedream", 1, 1)
    return without(p, 1, row_of(p, 1, Op.FORWARD, 2))


def has_a_forward_twice():
    p = program_of("pipedream", 1, 1)
    return twice(p, 0, row_of(p, 0, Op.FORWARD, 2))


def lacks_a_backward():
    p = program_of("pipedream", 1, 1)
    return without(p, 1, row_of(p, 1, Op.BACKWARD, 2))


def lacks_a_weight_part():
    p = program_of("zb-h1", 1, 1, microbatches=4, number=1)
    return without(p, 0, row_of(p, 0, Op.BACKWARD_WEIGHT, 1))


def lacks_a_recomputation():
    p = program_of("gpipe", 1, 1, microbatches=4, number=1, recompute="always")
    return without(p, 0, row_of(p, 0, Op.RECOMPUTE, 1))


def runs_on_the_wrong_replica():
    p = program_of("data-parallel", 2)
    rows = p.rows[0].copy()
    rows[rows[:, 2] == 2, 2] = 3
    return with_rows(p, 0, rows)


def backward_before_forward():
    p = program_of("pipedream", 1, 1)
    return swapped(p, 0, row_of(p, 0, Op.FORWARD, 2), row_of(p, 0, Op.BACKWARD, 2))


def forward_before_its_input():
    p = program_of("pipedream", 1, 1)
    return swapped(p, 1, row_of(p, 1, Op.WAIT_RECV, 2), row_of(p, 1, Op.FORWARD, 2))


def sends_before_the_forward():
    p = program_of("pipedream", 1, 1)
    return swapped(p, 0, row_of(p, 0, Op.FORWARD, 2), row_of(p, 0, Op.POST_SEND, 2))


def never_waits_for_a_send():
    p = program_of("pipedream", 1, 1)
    return without(p, 0, row_of(p, 0, Op.WAIT_SEND, 1))


def waits_for_what_was_not_posted():
    p = program_of("pipedream", 1, 1)
    return without(p, 1, row_of(p, 1, Op.POST_RECV, 3))


def sends_in_another_order():
    p = program_of("gpipe", 1, 1, microbatches=4, number=1)
    for op in (Op.FORWARD, Op.POST_SEND):
        p = swapped(p, 0, row_of(p, 0, op, 1), row_of(p, 0, op, 2))
    return p


def receives_one_too_few():
    p = program_of("pipedream", 1, 1)
    p = without(p, 1, row_of(p, 1, Op.WAIT_RECV, 3))
    return without(p, 1, row_of(p, 1, Op.POST_RECV, 3))


def waits_for_each_other():
    p = program_of("pipedream", 1, 1)
    return moved(p, 0, row_of(p, 0, Op.WAIT_RECV, 0), row_of(p, 0, Op.POST_SEND, 0))


def blocking_sends():
    """Asynchronous 1F1B whose every send is waited for at once, its receives posted late (DESIGN, fact 1)."""
    p = program_of("pipedream", 1, 1, 1, number=6)
    rows = []
    for table in p.rows:
        order, late = [], {}
        for row in table.tolist():
            if row[0] == Op.POST_RECV:
                late[row[2], row[3]] = row
            elif row[0] == Op.WAIT_RECV:
                order += [late.pop((row[2], row[3])), row]
            elif row[0] == Op.POST_SEND:
                order += [row, [int(Op.WAIT_SEND), *row[1:]]]
            elif row[0] != Op.WAIT_SEND:
                order.append(row)
        rows.append(np.array(order, np.int32))
    return dataclasses.replace(p, rows=tuple(rows))


def other_weights_backward():
    p = program_of("pipedream", 1, 1, 1, number=6)
    row = row_of(p, 0, Op.BACKWARD, 4)
    p = changed(p, 0, row, "version", 3)
    return changed(p, 0, row, "weights", 0)


def version_overwritten():
    p = program_of("pipedream", 1, 1, 1, number=6)
    return changed(p, 0, row_of(p, 0, Op.UPDATE, 1), "write", 0)


def too_few_weight_slots():
    p = program_of("pipedream", 1, 1, 1, number=6)
    slots = (dataclasses.replace(p.slots[0], weights=2), *p.slots[1:])
    return dataclasses.replace(p, slots=slots)


def version_from_the_future():
    p = program_of("pipedream", 1, 1)
    return changed(p, 0, row_of(p, 0, Op.FORWARD, 1), "version", 1)


def input_overwritten():
    p = program_of("pipedream", 1, 1, 1, number=6)
    return moved(p, 1, row_of(p, 1, Op.POST_RECV, 4, 0), row_of(p, 1, Op.BACKWARD, 1))


def output_overwritten():
    p = program_of("pipedream", 1, 1, number=6)
    return moved(p, 0, row_of(p, 0, Op.WAIT_SEND, 1), row_of(p, 0, Op.FORWARD, 3) + 1)


def saved_overwritten():
    p = program_of("gpipe", 1, microbatches=3, number=1)
    p = changed(p, 0, row_of(p, 0, Op.FORWARD, 1), "saved", 0)
    return changed(p, 0, row_of(p, 0, Op.BACKWARD, 1), "saved", 0)


def gradient_overwritten():
    p = program_of("pipedream", 1, 1, 1, number=6)
    return moved(p, 1, row_of(p, 1, Op.WAIT_SEND, 1, 2), row_of(p, 1, Op.BACKWARD, 3) + 1)


def wrong_slot():
    p = program_of("pipedream", 1, 1, number=6)
    return changed(p, 0, row_of(p, 0, Op.POST_SEND, 2), "slot", 1)


def update_too_early():
    p = program_of("1f1b", 1, 1, microbatches=4, number=1)
    return moved(p, 0, row_of(p, 0, Op.UPDATE, 3), row_of(p, 0, Op.BACKWARD, 3))


def lacks_an_update():
    p = program_of("pipedream", 1, 1)
    return without(p, 1, row_of(p, 1, Op.UPDATE, 3))


def update_not_reduced():
    p = program_of("data-parallel", 2)
    p = without(p, 1, row_of(p, 1, Op.POST_REDUCE, 1))
    return without(p, 1, row_of(p, 1, Op.WAIT_REDUCE, 1))


def reduced_before_the_backward():
    p = program_of("data-parallel", 2)
    return moved(p, 0, row_of(p, 0, Op.WAIT_REDUCE, 1), row_of(p, 0, Op.BACKWARD, 0))


def replicas_that_do_not_share():
    return dataclasses.replace(program_of("data-parallel", 2), microbatches_per_update=(3,))


def incomplete_round():
    return dataclasses.replace(program_of("1f1b", 1, microbatches=4, number=1), microbatches_per_update=(3,))


def reduces_two_stages_in_another_order():
    chosen = ScheduleChoice(name="interleaved", microbatches=4)
    p = generate(chosen, loop(1, 2, replicas=2), 1)
    one = int(np.flatnonzero((p.rows[1][:, 0] == Op.POST_REDUCE) & (p.rows[1][:, 1] == 1))[0])
    other = int(np.flatnonzero((p.rows[1][:, 0] == Op.POST_REDUCE) & (p.rows[1][:, 1] == 0))[0])
    before = int(np.flatnonzero((p.rows[1][:, 0] == Op.BACKWARD) & (p.rows[1][:, 1] == 0))[-2])
    assert before < one < other
    return moved(p, 1, other, one)


def recomputes_from_another_input():
    p = program_of("gpipe", 1, 1, microbatches=4, number=1, recompute="always")
    return changed(p, 1, row_of(p, 1, Op.RECOMPUTE, 1), "input", 2)


def no_such_slot():
    p = program_of("pipedream", 1, 1)
    return changed(p, 0, row_of(p, 0, Op.FORWARD, 1), "saved", 9)


def no_such_channel():
    p = program_of("pipedream", 1, 1)
    return changed(p, 0, row_of(p, 0, Op.POST_SEND, 1), "channel", 9)


def wrong_peer():
    p = program_of("pipedream", 2, 1)
    return changed(p, 2, row_of(p, 2, Op.POST_RECV, 1), "peer", 0)


def stage_of_another_rank():
    p = program_of("pipedream", 1, 1)
    rows = p.rows[0].copy()
    rows[3, 1] = 1
    return with_rows(p, 0, rows)


def no_such_operation():
    p = program_of("pipedream", 1, 1)
    rows = p.rows[0].copy()
    rows[3, 0] = 77
    return with_rows(p, 0, rows)


def no_such_microbatch():
    return dataclasses.replace(program_of("pipedream", 1, 1), num_microbatches=2)


def edge_backwards():
    p = program_of("pipedream", 1, 1)
    return dataclasses.replace(p, topology=Topology(p.topology.ranks, ((1, 0),)))


def group_of_others():
    p = program_of("data-parallel", 2)
    return dataclasses.replace(p, groups=(Group(0, (0,)),))


def rank_missing():
    p = program_of("pipedream", 1, 1)
    return dataclasses.replace(p, rows=p.rows[:1])


def last_group_twice(p: Program) -> Program:
    return dataclasses.replace(p, groups=(*p.groups, p.groups[-1]))


def assert_found(program: Program, fault: Fault, message: str) -> list[Violation]:
    """The checker says this of a program; return all that it says."""
    found = violations(program)
    assert any(v.fault is fault and message in v.message for v in found), "\n".join(map(str, found))
    return found


FAULTS: list[tuple[Callable[[], Program], Fault, str]] = [
    (lacks_a_forward, Fault.COVERAGE, "stage 1 has no FORWARD of microbatch 2"),
    (has_a_forward_twice, Fault.COVERAGE, "FORWARD of microbatch 2 at stage 0 once more (2 times)"),
    (lacks_a_backward, Fault.COVERAGE, "stage 1 has no BACKWARD of microbatch 2"),
    (lacks_a_weight_part, Fault.COVERAGE, "stage 0 has no BACKWARD_WEIGHT of microbatch 1"),
    (lacks_a_recomputation, Fault.COVERAGE, "stage 0 has no RECOMPUTE of microbatch 1"),
    (runs_on_the_wrong_replica, Fault.COVERAGE, "microbatch 3 of stage 0 belongs to replica 1, not 0"),
    (backward_before_forward, Fault.SEQUENCE, "backward of microbatch 2 stands before its FORWARD"),
    (
        forward_before_its_input,
        Fault.SEQUENCE,
        "use of the activation from stage 0 of microbatch 2 stands before",
    ),
    (sends_before_the_forward, Fault.SEQUENCE, "stands before its FORWARD"),
    (never_waits_for_a_send, Fault.COVERAGE, "no WAIT_SEND of the activation for stage 1 of microbatch 1"),
    (
        waits_for_what_was_not_posted,
        Fault.COVERAGE,
        "no POST_RECV of the activation from stage 0 of microbatch 3",
    ),
    (
        sends_in_another_order,
        Fault.ORDER,
        "message 1 is microbatch 2 where it is sent, 1 where it is received",
    ),
    (receives_one_too_few, Fault.ORDER, "4 sends, 3 receives"),
    (waits_for_each_other, Fault.DEADLOCK, "whatever the size of messages"),
    (blocking_sends, Fault.DEADLOCK, "once messages are too large for eager sends"),
    (other_weights_backward, Fault.VERSION, "BACKWARD of microbatch 4 uses version 3, its forward used 2"),
    (
        version_overwritten,
        Fault.VERSION,
        "needs version 0 of stage 0 in weight slot 0, which holds version 2",
    ),
    (too_few_weight_slots, Fault.SHAPE, "write = 2: stage 0 has no such weights slot"),
    (
        version_from_the_future,
        Fault.VERSION,
        "needs version 1 of stage 0 in weight slot 0, which holds version 0",
    ),
    (
        input_overwritten,
        Fault.SLOT,
        "input slot 1 of stage 1 is filled for microbatch 4 while microbatch 1 needs it",
    ),
    (
        output_overwritten,
        Fault.SLOT,
        "output slot 1 of stage 0 is filled for microbatch 3 while microbatch 1",
    ),
    (saved_overwritten, Fault.SLOT, "saved slot 0 of stage 0 is filled for microbatch 1 while microbatch 0"),
    (
        gradient_overwritten,
        Fault.SLOT,
        "grad_out slot 1 of stage 1 is filled for microbatch 3 while microbatch 1",
    ),
    (wrong_slot, Fault.SLOT, "uses slot 1, but microbatch 2 is in slot 0"),
    (
        reduces_two_stages_in_another_order,
        Fault.ORDER,
        "rank 0 posts the reduction of group 1 up to microbatch 3 here",
    ),
    (recomputes_from_another_input, Fault.SLOT, "uses input slot 2, but microbatch 1 is in slot 1"),
    (update_too_early, Fault.UPDATE, "update misses the gradients of microbatch 3"),
    (lacks_an_update, Fault.UPDATE, "stage 1 has 3 updates, not 4"),
    (update_not_reduced, Fault.UPDATE, "1 of POST_REDUCE for 2 updates over replicas"),
    (reduced_before_the_backward, Fault.UPDATE, "does not span exactly the last backward before its update"),
    (
        replicas_that_do_not_share,
        Fault.COUNT,
        "averages 3 microbatches an update, which its 2 replicas cannot share",
    ),
    (incomplete_round, Fault.COUNT, "4 microbatches do not fill updates of 3 at stage 0"),
    (no_such_slot, Fault.SHAPE, "saved = 9: stage 0 has no such saved slot"),
    (no_such_channel, Fault.SHAPE, "no channel has number 9"),
    (wrong_peer, Fault.SHAPE, "peer 0 does not run microbatch 1 of stage 0"),
    (stage_of_another_rank, Fault.SHAPE, "stage 1 is not played by rank 0"),
    (no_such_operation, Fault.SHAPE, "no operation has number 77"),
    (no_such_microbatch, Fault.SHAPE, "microbatch 2 of 2"),
    (edge_backwards, Fault.SHAPE, "an edge from stage 1 to stage 0"),
    (group_of_others, Fault.SHAPE, "group 0 is neither the replicas of a stage nor all ranks"),
    (rank_missing, Fault.SHAPE, "instructions for 1 ranks, stages on 2"),
]
