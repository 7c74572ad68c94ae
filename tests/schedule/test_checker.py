"""Broken programs of every kind are refused with the right message, and nothing unsafe passes."""

from __future__ import annotations

import pytest
import symbolic
from broken import (
    FAULTS,
    assert_found,
    blocking_sends,
    changed,
    has_a_forward_twice,
    lacks_a_forward,
    lacks_an_update,
    moved,
    program_of,
    row_of,
    swapped,
    twice,
    update_not_reduced,
    with_rows,
    without,
)  # fmt: skip
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import cases, vee

from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.check import CheckedProgram, UnsafeProgram, check, violations
from pdmpi.schedule.program import NO_SLOT, OPERANDS, Op, Program, SlotCounts
from pdmpi.schedule.registry import generate
from pdmpi.schedule.violation import Fault


@pytest.mark.parametrize(("broken", "fault", "message"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_every_kind_of_fault_is_named(broken, fault, message):
    program = broken()
    found = assert_found(program, fault, message)
    with pytest.raises(UnsafeProgram, match="is unsafe") as caught:
        check(program)
    placed = [v for v in found if v.rank >= 0]
    assert ("<-- ERROR HERE" in caught.value.report) == bool(placed)
    assert all(str(v) in caught.value.report for v in found)
    assert "\n" not in str(caught.value)


def test_the_grid_marks_the_place():
    with pytest.raises(UnsafeProgram) as caught:
        check(has_a_forward_twice())
    lines = caught.value.report.splitlines()
    assert lines == [
        "coverage: rank 0, instruction 12: FORWARD of microbatch 2 at stage 0 once more (2 times)",
        "",
        "rank 0  F0   F1   .    .    B0   -    F2   [F2] B1   -    F3   B2   -    .    B3   -     "
        "<-- ERROR HERE",
        "rank 1  .    F0   B0   -    F1   B1   -    .    F2   B2   -    F3   B3   -    .    .",
    ]


def test_every_violation_is_reported_at_once():
    program = lacks_an_update()
    program = changed(program, 0, row_of(program, 0, Op.POST_SEND, 2), "slot", 1)
    assert {v.fault for v in violations(program)} >= {Fault.UPDATE, Fault.SLOT}


def test_an_unchecked_program_cannot_be_wrapped():
    with pytest.raises(UnsafeProgram):
        CheckedProgram(lacks_a_forward())
    sound = program_of("pipedream", 1, 1)
    assert check(sound).program is sound


def test_eager_sends_hide_the_deadlock_of_blocking_sends():
    program = blocking_sends()
    assert {v.fault for v in violations(program)} == {Fault.DEADLOCK}
    symbolic.run(program, rendezvous=False)
    with pytest.raises(symbolic.Stuck):
        symbolic.run(program, rendezvous=True)


def test_a_wait_for_a_member_that_never_reduces_is_a_deadlock():
    found = violations(update_not_reduced())
    assert any(v.fault is Fault.DEADLOCK and "ends without it" in v.message for v in found)


@st.composite
def mutants(draw: st.DrawFn) -> Program:
    """A sound program with one or two instructions changed, moved, left out or doubled."""
    program = generate(*draw(cases(max_stages=3, max_microbatches=6)))
    for _ in range(draw(st.integers(1, 2))):
        rank = draw(st.integers(0, len(program.rows) - 1))
        num = len(program.rows[rank])
        row, other = draw(st.integers(0, num - 1)), draw(st.integers(0, num - 1))
        how = draw(st.sampled_from(["delete", "double", "move", "swap", "alter", "alter", "next"]))
        if how == "delete":
            program = without(program, rank, row)
        elif how == "double":
            program = twice(program, rank, row)
        elif how == "move":
            program = moved(program, rank, row, min(other, num - 1))
        elif how == "swap":
            program = swapped(program, rank, row, other)
        elif how == "next":
            program = swapped(program, rank, row, min(row + 1, num - 1))
        else:
            rows = program.rows[rank].copy()
            column = draw(st.integers(1, 2 + len(OPERANDS[Op(int(rows[row, 0]))])))
            rows[row, column] += draw(st.sampled_from([-1, 1]))
            program = with_rows(program, rank, rows)
    return program


@settings(max_examples=300)
@given(mutants(), st.integers(0, 1000))
def test_whatever_the_checker_passes_does_what_it_should(program, seed):
    if not violations(program):
        symbolic.run(program, seed, rendezvous=True)
        symbolic.run(program, seed + 1, rendezvous=False)


@settings(max_examples=100)
@given(mutants())
def test_a_report_can_be_drawn_of_any_broken_program(program):
    found = violations(program)
    if found:
        assert all(str(v) in UnsafeProgram(program, found).report for v in found)


def test_zero_bubble_with_stages_on_one_rank_is_checked_too():
    choice = ScheduleChoice(name="zb-v", microbatches=6)
    program = generate(choice, vee(3), 1)
    row = row_of(program, 2, Op.BACKWARD_WEIGHT, 2)
    assert any(v.fault is Fault.SEQUENCE for v in violations(moved(program, 2, row, 0)))
    assert program.slots[0] == SlotCounts(weights=1, input=6, output=6, saved=6, grad_in=1)
    assert NO_SLOT not in program.rows[0][program.rows[0][:, 0] == Op.FORWARD, 7]
