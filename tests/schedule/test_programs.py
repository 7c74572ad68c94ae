"""Every schedule on every shape: checked clean, and run on symbols by an independent machine."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import symbolic
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import cases, straight, with_skips

from pdmpi.plan.depth import in_flight_depth, synchronised_versions
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.check import violations
from pdmpi.schedule.dump import dump, parse
from pdmpi.schedule.evaluation import evaluation
from pdmpi.schedule.program import NO_SLOT, Op, Program
from pdmpi.schedule.registry import SCHEDULES, generate
from pdmpi.schedule.staleness import version_lag


def same(a: Program, b: Program) -> bool:
    fields = [f.name for f in dataclasses.fields(Program) if f.name != "rows"]
    return all(getattr(a, f) == getattr(b, f) for f in fields) and all(
        np.array_equal(x, y) for x, y in zip(a.rows, b.rows, strict=True)
    )


@settings(max_examples=100)
@given(cases())
def test_every_program_is_clean_and_its_text_is_the_same_program(case):
    program = generate(*case)
    assert violations(program) == []
    assert same(parse(dump(program)), program)


@settings(max_examples=80)
@given(cases(max_microbatches=12), st.integers(0, 1000), st.booleans())
def test_every_program_does_on_symbols_what_it_should(case, seed, rendezvous):
    program = generate(*case)
    updates = symbolic.run(program, seed, rendezvous)
    assert len(updates) == sum(program.num_microbatches // n for n in program.microbatches_per_update)


@pytest.mark.parametrize("name", SCHEDULES)
def test_planner_and_schedules_know_the_same_names(name):
    from pdmpi.plan.terms import SCHEDULES as PLANNED

    assert name in PLANNED
    assert len(PLANNED) == len(SCHEDULES)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 40), st.data())
def test_evaluation_passes_everything_forward_and_saves_nothing(replicas, number, data):
    program = evaluation(data.draw(with_skips(straight(*replicas))), number)
    assert violations(program) == []
    assert symbolic.run(program, number) == {}
    rows = np.concatenate(program.rows)
    forwards = rows[rows[:, 0] == Op.FORWARD]
    assert len(forwards) == number * len(replicas)
    assert set(forwards[:, 7]) == {NO_SLOT}
    assert all(slots.saved == 0 and slots.weights == 1 for slots in program.slots if number >= max(replicas))


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 3))
def test_pipedream_uses_the_versions_of_its_update_rule(num_stages, number, extra):
    program = generate(ScheduleChoice(extra_in_flight=extra), straight(*[1] * num_stages), number)
    updates = symbolic.run(program)
    for stage in range(num_stages):
        ahead = -(-extra * (num_stages - 1 - stage) // max(num_stages - 1, 1))
        for k in range(number):
            version = max(0, k - num_stages + 1 + stage - ahead)
            assert updates[stage, k + 1] == [(k, version)]
        depth = num_stages - stage + ahead
        assert program.slots[stage].weights == min(depth, number)
        assert program.slots[stage].saved == min(depth, number)


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(1, 40))
def test_vertical_sync_uses_the_input_stages_version_everywhere(num_stages, number):
    program = generate(ScheduleChoice(name="pipedream-vsync"), straight(*[1] * num_stages), number)
    updates = symbolic.run(program)
    for stage in range(num_stages):
        for k in range(number):
            assert updates[stage, k + 1] == [(k, max(0, k - num_stages + 1))]
    assert {slots.weights for slots in program.slots} == {min(num_stages, number)}


@settings(max_examples=60)
@given(cases(names=("pipedream-vsync",)))
def test_vertical_sync_never_uses_what_the_input_stage_did_not_have(case):
    program = generate(*case)
    replicas = program.topology.replicas
    lags = version_lag(program)
    k = np.arange(program.num_microbatches)
    entered = (k // replicas[0] - lags[0]) * replicas[0]
    for stage, count in enumerate(replicas):
        included = (k // count - lags[stage]) * count
        assert (included <= entered).all()
        assert (included > entered - count).all()


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("replicas", [(1, 1, 1, 1), (2, 1), (1, 2), (2, 3), (3, 1, 2), (4, 2, 1), (1, 4, 3)])
def test_vertical_sync_holds_the_versions_that_the_planner_counts(replicas, extra):
    choice = ScheduleChoice(name="pipedream-vsync", extra_in_flight=extra)
    topology = straight(*replicas)
    program = generate(choice, topology, 8 * topology.round)
    assert tuple(slots.weights for slots in program.slots) == synchronised_versions(replicas, extra)


@settings(max_examples=40)
@given(cases(names=("2bw",)))
def test_2bw_holds_two_versions_and_lags_one_update(case):
    program = generate(*case)
    assert all(slots.weights <= 2 for slots in program.slots)
    for lag in version_lag(program):
        first = program.microbatches_per_update[0]
        assert not lag[:first].any()
        assert (lag[first:] == 1).all()


@settings(max_examples=60)
@given(cases(names=("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "data-parallel", "model-parallel")))
def test_what_flushes_has_one_version_and_no_lag(case):
    program = generate(*case)
    assert {slots.weights for slots in program.slots} == {1}
    assert not any(lag.any() for lag in version_lag(program))


@settings(max_examples=60)
@given(cases(names=("pipedream", "1f1b", "2bw")))
def test_a_replica_holds_as_many_microbatches_as_the_depth_says(case):
    choice, topology, _ = case
    program = generate(*case)
    depths = in_flight_depth(topology.replicas, choice.extra_in_flight)
    share = program.num_microbatches if choice.name != "1f1b" else choice.microbatches
    for stage, depth in enumerate(depths):
        slots = program.slots[stage]
        assert slots.input in (
            min(depth, share // topology.replicas[stage]),
            min(depth + 1, program.num_microbatches // topology.replicas[stage]),
        )
        if choice.recompute == "never":
            assert slots.saved == min(depth, share // topology.replicas[stage])


@pytest.mark.parametrize(("replicas", "depths"), [
    ((1, 1, 1, 1), (4, 3, 2, 1)),
    ((2, 1), (2, 1)),
    ((1, 2), (3, 1)),
    ((2, 2), (2, 1)),
    ((15, 1), (2, 1)),
    ((1, 4, 2), (7, 2, 1)),
])  # fmt: skip
def test_depth_is_warm_up_plus_one(replicas, depths):
    assert in_flight_depth(replicas) == depths


def test_extra_minibatches_are_shared_by_replicas():
    assert in_flight_depth((2, 1, 1), 1) == (3, 3, 1)


def test_extra_minibatches_taper_off_so_that_every_boundary_has_one():
    assert in_flight_depth((1, 1, 1, 1), 3) == (7, 5, 3, 1)
    assert in_flight_depth((1, 1, 1, 1), 1) == (5, 4, 3, 1)


@pytest.mark.parametrize("policy", ["never", "except-last", "always"])
def test_recomputation_saves_slots_and_keeps_the_order(policy):
    choice = ScheduleChoice(name="gpipe", microbatches=4, recompute=policy)
    program = generate(choice, straight(1, 1), 2)
    again = [sum(i.op is Op.RECOMPUTE for i in program.instructions(r)) for r in (0, 1)]
    saved = [slots.saved for slots in program.slots]
    assert (again, saved) == {
        "never": ([0, 0], [4, 4]),
        "except-last": ([6, 6], [1, 1]),
        "always": ([8, 8], [1, 1]),
    }[policy]


def test_single_stages_recompute_too():
    program = generate(ScheduleChoice(), straight(1, 1, 1), 6, recompute_stages=[0])
    assert [slots.saved for slots in program.slots] == [1, 2, 1]
    assert violations(program) == []


def test_a_reduction_spans_the_last_backward_of_a_round():
    program = generate(ScheduleChoice(name="1f1b", microbatches=4), straight(2, 1), 1)
    ops = [i.op for i in program.instructions(0)]
    post, wait, update = (ops.index(op) for op in (Op.POST_REDUCE, Op.WAIT_REDUCE, Op.UPDATE))
    assert [op for op in ops[post:wait] if op is Op.BACKWARD] == [Op.BACKWARD]
    assert ops[:post].count(Op.BACKWARD) == 1
    assert wait < update
    assert not any(i.op in (Op.POST_REDUCE, Op.WAIT_REDUCE) for i in program.instructions(2))
