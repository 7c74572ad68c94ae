"""Replicas that normalise together: programs, what the checker says, what the waits cost."""

from __future__ import annotations

import dataclasses

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
from pdmpi.schedule.program import Group, Op, Program
from pdmpi.schedule.registry import generate
from pdmpi.schedule.violation import Fault
from pdmpi.simulate.costs import Costs
from pdmpi.simulate.engine import simulate

NORMALISING = tuple(name for name, terms in TERMS.items() if terms.flushes and not name.startswith("zb"))


def together(*replicas: int, name: str = "1f1b", stages: tuple[int, ...] = (0,)) -> Program:
    choice = ScheduleChoice(name=name, microbatches=8)
    return generate(choice, straight(*replicas), 2, joint_statistics=stages)


@settings(max_examples=60)
@given(cases(names=NORMALISING, max_microbatches=12), st.data(), st.integers(0, 1000), st.booleans())
def test_every_flushed_schedule_with_whole_backwards_can(case, data, seed, rendezvous):
    """Flushed 1F1B may need more microbatches in flight; the checker tells when."""
    choice, topology, number = case
    stages = data.draw(st.sets(st.integers(0, topology.num_stages - 1), min_size=1))
    program = generate(*case, joint_statistics=stages)
    found = violations(program)
    for extra in range(1, 2 * topology.round + 1):
        if not found:
            break
        assert choice.name == "1f1b"
        assert {violation.fault for violation in found} == {Fault.DEADLOCK}
        with pytest.raises(symbolic.Stuck):
            symbolic.run(program, seed, rendezvous)
        case = (dataclasses.replace(choice, extra_in_flight=choice.extra_in_flight + extra), topology, number)
        program = generate(*case, joint_statistics=stages)
        found = violations(program)
    assert found == []
    assert symbolic.run(program, seed, rendezvous) == symbolic.run(generate(*case), seed, rendezvous)
    assert parse(dump(program)).groups == program.groups


def test_replicas_wait_for_each_other_before_each_turn():
    program = together(2, 1)
    assert program.groups == (Group(0, (0, 1)), Group(0, (0, 1), statistics=True))
    for rank in (0, 1):
        rows = list(program.instructions(rank))
        found = [i for i, row in enumerate(rows) if row.op in (Op.FORWARD, Op.BACKWARD)]
        assert len(found) == 16
        for i in found:
            assert [(row.op, row["group"]) for row in rows[i - 2 : i]] == [
                (Op.POST_REDUCE, 1), (Op.WAIT_REDUCE, 1)
            ]  # fmt: skip
    assert together(1, 1).groups == ()
    assert all(row.op is not Op.POST_REDUCE for row in program.instructions(2))


def first(program: Program, op: Op, group: int = 1) -> int:
    rows = program.rows[0]
    return int(np.flatnonzero((rows[:, 0] == op) & (rows[:, 3] == group))[0])


def wait_missing(p: Program) -> Program:
    p = without(p, 0, first(p, Op.WAIT_REDUCE))
    return without(p, 0, first(p, Op.POST_REDUCE))


def wait_elsewhere(p: Program) -> Program:
    return moved(p, 0, first(p, Op.POST_REDUCE), 0)


def other_turns(p: Program) -> Program:
    rows = p.rows[0].copy()
    at = np.flatnonzero(rows[:, 0] == Op.FORWARD)
    for i in (0, 1, 2):  # with the two rows that wait before it
        rows[[at[0] - i, at[1] - i]] = rows[[at[1] - i, at[0] - i]]
    return dataclasses.replace(p, rows=(rows, *p.rows[1:]))


def of_one_replica(p: Program) -> Program:
    return dataclasses.replace(p, groups=(*p.groups, Group(1, (2,), statistics=True)))


@pytest.mark.parametrize(("breaks", "fault", "message"), [
    (wait_missing, Fault.UPDATE, "the replicas of stage 0 do not wait for each other before it"),
    (wait_missing, Fault.DEADLOCK, "waits for ever"),
    (wait_elsewhere, Fault.UPDATE, "before nothing that they run together"),
    (other_turns, Fault.ORDER, "normalise together, but rank 0 runs FORWARD of turn 1 here"),
    (of_one_replica, Fault.SHAPE, "sums the statistics of one replica"),
    (last_group_twice, Fault.SHAPE, "stage 0 has several groups"),
])  # fmt: skip
def test_the_checker_sees_what_is_wrong(breaks, fault, message):
    assert_found(breaks(together(2, 1)), fault, message)


def test_a_backward_in_two_parts_is_refused():
    found = violations(together(2, 2, name="zb-h1"))
    assert any("two parts" in v.message for v in found)


def test_it_costs_the_wait_for_the_slowest():
    plain = generate(ScheduleChoice(name="1f1b", microbatches=8), straight(2, 1), 2)
    even = Costs.uniform(plain.topology)
    assert simulate(together(2, 1), even).duration_s == simulate(plain, even).duration_s
    uneven = dataclasses.replace(even, speeds=(1.0, 0.5, 4.0))
    ends = [
        simulate(program, uneven).end_s[0][np.flatnonzero(program.rows[0][:, 0] == Op.FORWARD)]
        for program in (plain, together(2, 1))
    ]
    assert ends[1][1] > ends[0][1]
