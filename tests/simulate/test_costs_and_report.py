"""Costs of a plan, and what a timeline is summed up to."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from small_plans import LAYER_BYTES, MICROBATCH, SPEC, small_plan

from pdmpi.plan.cluster import Device
from pdmpi.plan.partition import estimate_of, partition
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.plan.profile import CUDA_GRAPHS
from pdmpi.schedule.program import Channel, Kind, Op, Topology
from pdmpi.schedule.registry import generate
from pdmpi.simulate.costs import Costs, costs_of
from pdmpi.simulate.engine import simulate
from pdmpi.simulate.forecast import forecast
from pdmpi.simulate.report import memory_of, summarise


def test_costs_of_a_plan() -> None:
    plan = small_plan(2, 1, 1)
    costs = costs_of(plan)
    layers = [sum(name != "x" for name in stage.layers) for stage in plan.stages]
    assert layers == [6, 3, 3]
    for stage, n in zip(costs.stages, layers, strict=True):
        assert stage.forward_s == pytest.approx(0.002 * n)
        assert stage.backward_s == pytest.approx(0.004 * n)
        assert stage.seconds(Op.BACKWARD_INPUT) == pytest.approx(0.002 * n)
        assert stage.seconds(Op.BACKWARD_WEIGHT) == pytest.approx(0.002 * n)
        assert stage.seconds(Op.RECOMPUTE) == stage.forward_s
        assert stage.parameter_bytes == stage.gradient_bytes == stage.state_bytes == n * LAYER_BYTES
    assert costs.message_bytes == {
        Channel(Kind.ACTIVATION, 0, 1): SPEC.nbytes, Channel(Kind.GRADIENT, 1, 0): SPEC.nbytes,
        Channel(Kind.ACTIVATION, 1, 2): SPEC.nbytes, Channel(Kind.GRADIENT, 2, 1): SPEC.nbytes,
    }  # fmt: skip
    assert costs.network.message_s(0, 2, SPEC.nbytes) == pytest.approx(1e-5 + SPEC.nbytes / 1e9)
    assert costs.network.message_s(0, 0, SPEC.nbytes) == 0.0


def test_frozen_layers_cost_no_gradient_and_no_half_of_their_backward() -> None:
    plan = small_plan(1, 1)
    graph = plan.profile.graph
    layers = tuple(replace(layer, trainable=layer.name != "l0") for layer in graph.layers)
    profile = replace(plan.profile, graph=replace(graph, layers=layers))
    before, after = costs_of(plan).stages[0], costs_of(replace(plan, profile=profile)).stages[0]
    assert before.gradient_bytes - after.gradient_bytes == LAYER_BYTES
    assert after.parameter_bytes == before.parameter_bytes
    assert after.backward_input_s == pytest.approx(before.backward_input_s + 0.002)


@pytest.mark.parametrize(("name", "added"), [("pipedream", 0.0), ("1f1b", 1e-9)])
def test_microbatches_that_share_an_update_add_their_gradients(name: str, added: float) -> None:
    plan = small_plan(1, 1, schedule=ScheduleChoice(name=name, microbatches=4 if added else 1))
    slower = replace(plan, profile=replace(plan.profile, accumulate_s_per_byte=1e-9))
    before, after = costs_of(plan).stages[0], costs_of(slower).stages[0]
    assert after.backward_s - before.backward_s == pytest.approx(added * before.gradient_bytes)
    assert after.backward_input_s == before.backward_input_s
    found = partition(slower.profile, plan.cluster, plan.schedule, shape=(1, 1))
    period_s = partition(plan.profile, plan.cluster, plan.schedule, shape=(1, 1)).prediction.period_s
    # each of 4 microbatches, and the one that fills the pipeline
    assert found.prediction.period_s - period_s == pytest.approx(5 / 4 * added * before.gradient_bytes)


def test_a_slow_device_slows_its_rank() -> None:
    plan = small_plan(1, 1)
    kinds = (Device(relative_speed=1.0), Device(relative_speed=0.5))
    costs = costs_of(replace(plan, cluster=replace(plan.cluster, devices=kinds)))
    assert costs.compute_s(Op.FORWARD, 1, 1) == 2 * costs.compute_s(Op.FORWARD, 0, 0)


@pytest.mark.parametrize(("device", "on_device"), [("cpu", False), ("cuda", True)])
def test_buckets_are_those_of_the_runtime(device: str, on_device: bool) -> None:
    torch = pytest.importorskip("torch", reason="the runtime needs torch")
    from pdmpi.runtime.gradients import GradientReducer
    from pdmpi.runtime.slots import host_memory

    plan = small_plan(2)
    profile = replace(plan.profile, machine={"device": device})
    costs = costs_of(replace(plan, profile=profile))
    costs = replace(costs, stages=(replace(costs.stages[0], gradient_bytes=48 << 20),))
    sums: list[int] = []
    transport = SimpleNamespace(
        sums_on_device=on_device, bind_allreduce=lambda buffer, *_: sums.append(buffer.nbytes)
    )
    weights = {str(i): torch.nn.Parameter(torch.zeros(1 << 18)) for i in range(48)}
    GradientReducer(weights, transport, [0, 1], host_memory)
    assert len(sums) == costs.buckets(0) == (2 if on_device else 12)


def test_a_balanced_pipeline_is_busy_in_the_steady_state() -> None:
    program = generate(ScheduleChoice(), Topology.straight([1] * 4), 40)
    costs = Costs.uniform(program.topology)
    report = summarise(simulate(program, costs), costs, microbatch_size=16)
    assert report.period_s == 3.0
    assert report.samples_per_s == pytest.approx(16 / 3)
    assert report.overall_microbatches_per_s == pytest.approx(40 / (40 * 3 + 3 * 3))
    assert [rank.in_flight for rank in report.ranks] == [4, 3, 2, 1]
    for rank in report.ranks:
        assert rank.utilisation == pytest.approx(1.0)
        assert rank.busy_s + rank.idle_s == report.duration_s


@pytest.mark.parametrize("microbatches", [4, 8])
def test_the_bubble_of_repeated_flushes_is_in_the_period(microbatches: int) -> None:
    choice = ScheduleChoice(name="1f1b", microbatches=microbatches)
    program = generate(choice, Topology.straight([1] * 4), 8)
    costs = Costs.uniform(program.topology)
    report = summarise(simulate(program, costs), costs)
    assert report.period_s == pytest.approx(3.0 * (microbatches + 3) / microbatches)
    assert report.ranks[0].utilisation == pytest.approx(microbatches / (microbatches + 3))


def test_too_short_a_program_has_no_steady_state() -> None:
    program = generate(ScheduleChoice(), Topology.straight([1] * 4), 5)
    costs = Costs.uniform(program.topology)
    report = summarise(simulate(program, costs), costs)
    assert report.steady_to_s == report.steady_from_s
    assert report.microbatches_per_s == report.overall_microbatches_per_s


def saved_bytes(choice: ScheduleChoice, rank: int, stages: int = 4) -> int:
    program = generate(choice, Topology.straight([1] * stages), 2 if choice.microbatches > 1 else 20)
    costs = Costs.uniform(program.topology)
    costs = replace(costs, stages=tuple(replace(s, saved_bytes=100) for s in costs.stages))
    return memory_of(program, rank, costs)["saved"]


def test_activations_alive_at_once() -> None:
    flush = ScheduleChoice(name="gpipe", microbatches=8)
    assert [saved_bytes(ScheduleChoice(), rank) for rank in range(4)] == [400, 300, 200, 100]
    assert [saved_bytes(flush, rank) for rank in range(4)] == [800] * 4
    assert [saved_bytes(replace(flush, name="1f1b"), rank) for rank in range(4)] == [400, 300, 200, 100]
    assert [saved_bytes(replace(flush, recompute="always"), rank) for rank in range(4)] == [100] * 4


def test_graphs_hold_what_a_forward_needs_with_every_saved_slot() -> None:
    def parts(graphs: str, forward_bytes: int, schedule: ScheduleChoice) -> list[dict[str, int]]:
        plan = small_plan(1, 1, schedule=schedule)
        costs = tuple(replace(c, forward_workspace_bytes=forward_bytes) for c in plan.profile.costs)
        profile = replace(plan.profile, costs=costs, machine={CUDA_GRAPHS: graphs})
        return [rank.memory_parts for rank in forecast(replace(plan, profile=profile)).report.ranks]

    flush = ScheduleChoice(name="gpipe", microbatches=8)
    assert [p["graphs"] for p in parts("yes", 700, flush)] == [8 * 700, 8 * 700]
    assert [p["graphs"] for p in parts("yes", 700, ScheduleChoice())] == [2 * 700, 700]
    assert [p["graphs"] for p in parts("no", 700, flush)] == [0, 0]
    assert [p["graphs"] for p in parts("yes", 700, replace(flush, name="zb-h1"))] == [2 * 700, 2 * 700]
    assert [p["graphs"] for p in parts("yes", 700, replace(flush, recompute="always"))] == [700, 700]


@pytest.mark.parametrize("microbatches", [12, 24])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1), (2, 2), (3, 1, 1, 1), (1, 4), (3, 1, 3)])
def test_planner_and_simulator_agree_on_what_is_saved(
    name: str, shape: tuple[int, ...], microbatches: int
) -> None:
    plan = small_plan(*shape, schedule=ScheduleChoice(name=name, microbatches=microbatches))
    costs = tuple(replace(c, split_bytes=c.saved_bytes // 2) for c in plan.profile.costs)
    plan = replace(plan, profile=replace(plan.profile, costs=costs))
    simulated = {rank.stages[0]: rank.memory_parts["saved"] for rank in forecast(plan).report.ranks}
    planned = estimate_of(plan).stages
    assert [stage.memory_parts["saved"] for stage in planned] == [simulated[s] for s in range(len(shape))]


def test_a_backward_in_two_parts_keeps_gradients_between_them_where_there_is_a_first() -> None:
    def saved(name: str) -> list[int]:
        plan = small_plan(1, 1, schedule=ScheduleChoice(name=name, microbatches=8))
        plain = [rank.memory_parts["saved"] for rank in forecast(plan).report.ranks]
        costs = tuple(replace(c, split_bytes=c.saved_bytes) for c in plan.profile.costs)
        split = forecast(replace(plan, profile=replace(plan.profile, costs=costs))).report.ranks
        return [rank.memory_parts["saved"] / bytes for rank, bytes in zip(split, plain, strict=True)]

    assert saved("1f1b") == [1, 1]
    assert saved("zb-h1") == [1, 2]


def test_graphs_hold_saved_slots_that_are_never_full_together() -> None:
    topology = Topology(((0,), (1,)) * 2, ((0, 1), (1, 2), (2, 3)))
    program = generate(ScheduleChoice(name="interleaved", microbatches=8), topology, 1)
    costs = Costs.uniform(topology)
    costs = replace(costs, stages=tuple(replace(s, saved_bytes=100) for s in costs.stages))
    assert [program.slots[s].saved for s in (1, 3)] == [3, 1]
    assert memory_of(program, 1, costs)["saved"] == 300
    assert memory_of(program, 1, replace(costs, graphed=True))["saved"] == 400


def test_memory_of_weights_gradients_and_slots() -> None:
    found = forecast(small_plan(1, 1, 1))
    ranks = found.report.ranks
    layers = [stage.parameter_bytes // LAYER_BYTES for stage in found.costs.stages]
    assert [rank.memory_parts["weights"] for rank in ranks] == [
        n * LAYER_BYTES * versions for n, versions in zip(layers, (3, 2, 1), strict=True)
    ]
    for rank, stage, n in zip(ranks, found.program.slots, layers, strict=True):
        parts = rank.memory_parts
        assert parts["gradients"] == parts["optimizer_state"] == n * LAYER_BYTES
        assert parts["slots"] % SPEC.nbytes == 0
        assert parts["saved"] == stage.saved * 3 * SPEC.nbytes * n
        assert rank.memory_bytes == sum(parts.values())
    assert ranks[1].memory_parts["slots"] == SPEC.nbytes * (
        found.program.slots[1].input + found.program.slots[1].output
        + found.program.slots[1].grad_in + found.program.slots[1].grad_out
    )  # fmt: skip
    assert found.report.samples_per_s == pytest.approx(MICROBATCH / found.report.period_s)


def test_the_planner_and_the_simulator_agree_on_a_straight_pipeline() -> None:
    plan = small_plan(1, 1, 1, bandwidth=1e12)
    assert forecast(plan).report.samples_per_s == pytest.approx(plan.prediction.samples_per_s, rel=0.02)
