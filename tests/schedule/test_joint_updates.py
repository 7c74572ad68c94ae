"""Updates that wait for a sum over all stages: programs, what the checker says, what they cost."""

from __future__ import annotations

import numpy as np
import pytest
import symbolic
from broken import assert_found, last_group_twice, moved, without
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import cases, straight

from pdmpi.plan.plan import ScheduleChoice
from pdmpi.plan.terms import SCHEDULES as TERMS
from pdmpi.schedule.check import violations
from pdmpi.schedule.dump import dump, parse
from pdmpi.schedule.program import ALL_STAGES, Group, Op, Program
from pdmpi.schedule.registry import generate
from pdmpi.schedule.violation import Fault
from pdmpi.simulate.costs import Costs
from pdmpi.simulate.engine import simulate

FLUSHED = tuple(name for name, terms in TERMS.items() if terms.flushes)


def joint(name: str, *replicas: int, number: int = 2) -> Program:
    choice = ScheduleChoice(name=name, microbatches=4)
    return generate(choice, straight(*replicas), number, joint_updates=True)


@settings(max_examples=60)
@given(cases(names=FLUSHED, max_microbatches=12), st.integers(0, 1000), st.booleans())
def test_every_flushed_schedule_can_update_jointly(case, seed, rendezvous):
    program = generate(*case, joint_updates=True)
    assert violations(program) == []
    assert symbolic.run(program, seed, rendezvous) == symbolic.run(generate(*case), seed, rendezvous)
    assert dump(parse(dump(program))) == dump(program)


def test_each_rank_joins_once_an_update_after_its_last_gradient():
    program = joint("1f1b", 2, 1)
    group = program.groups.index(Group(ALL_STAGES, (0, 1, 2)))
    for rank in range(3):
        rows = list(program.instructions(rank))
        for update in (i for i, row in enumerate(rows) if row.op is Op.UPDATE):
            assert [(row.op, row["group"]) for row in rows[update - 2 : update]] == [
                (Op.POST_REDUCE, group), (Op.WAIT_REDUCE, group)
            ]  # fmt: skip
        assert sum(row.op is Op.UPDATE for row in rows) == 2


def row_of_sum(program: Program, rank: int, op: Op) -> int:
    group = len(program.groups) - 1
    rows = program.rows[rank]
    return int(np.flatnonzero((rows[:, 0] == op) & (rows[:, 3] == group))[0])


def missing(p: Program) -> Program:
    p = without(p, 1, row_of_sum(p, 1, Op.WAIT_REDUCE))
    return without(p, 1, row_of_sum(p, 1, Op.POST_REDUCE))


def before_the_last_gradient(p: Program) -> Program:
    backward = int(np.flatnonzero(p.rows[1][:, 0] == Op.BACKWARD)[3])
    for op in (Op.WAIT_REDUCE, Op.POST_REDUCE):
        p = moved(p, 1, row_of_sum(p, 1, op), backward)
    return p


def after_the_update(p: Program) -> Program:
    update = int(np.flatnonzero(p.rows[1][:, 0] == Op.UPDATE)[0])
    return moved(p, 1, row_of_sum(p, 1, Op.WAIT_REDUCE), update)


@pytest.mark.parametrize(("breaks", "fault", "message"), [
    (missing, Fault.UPDATE, "1 and 1 posts and waits of the sum over all stages for 2 updates"),
    (missing, Fault.DEADLOCK, "waits for ever"),
    (before_the_last_gradient, Fault.UPDATE, "does not stand right before update 1"),
    (after_the_update, Fault.UPDATE, "does not stand right before update 1"),
    (last_group_twice, Fault.SHAPE, "several groups of all stages"),
])  # fmt: skip
def test_the_checker_sees_what_is_wrong(breaks, fault, message):
    assert_found(breaks(joint("1f1b", 1, 1)), fault, message)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_sum_costs_a_message_of_numbers_and_the_wait_for_the_slowest(name):
    plain = generate(ScheduleChoice(name=name, microbatches=4), straight(2, 1), 3)
    costs = Costs.uniform(plain.topology, message_s=0.01)
    together = joint(name, 2, 1, number=3)
    before, after = simulate(plain, costs), simulate(together, costs)
    assert before.duration_s <= after.duration_s <= before.duration_s * 1.1
    assert after.duration_s == pytest.approx(float(after.end_s[0][-1]), rel=0.1)
