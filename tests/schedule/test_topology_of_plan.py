"""A plan's topology: ranks from its placement, edges from its graph, gradients where something is trained."""

from __future__ import annotations

import dataclasses

import pytest

from pdmpi.errors import InputError
from pdmpi.graph import Layer, LayerGraph, Ref, TensorSpec
from pdmpi.plan.cluster import Cluster, Level
from pdmpi.plan.plan import Placement, Plan, Prediction, ScheduleChoice, StagePlan
from pdmpi.plan.profile import LayerCost, Profile
from pdmpi.schedule.check import violations
from pdmpi.schedule.registry import program_of
from pdmpi.schedule.topology import topology_of

FLOAT = TensorSpec(shape=(4, 8))
INDEX = TensorSpec(shape=(4, 8), dtype="int64", requires_grad=False)


def layer(name: str, *inputs: str, kind: str = "Linear", out: TensorSpec = FLOAT, **more) -> Layer:
    parameters = () if kind in ("Input", "ReLU") else (f"{name}.weight",)
    refs = tuple(Ref(n) for n in inputs)
    return Layer(name=name, kind=kind, inputs=refs, outputs=(out,), parameters=parameters, **more)


def plan_of(layers: list[Layer], stages: list[tuple[list[str], int]], **changes) -> Plan:
    graph = LayerGraph(tuple(layers), (Ref(layers[-1].name),))
    costs = tuple(
        LayerCost(forward_s=1e-3, backward_s=2e-3, output_bytes=128, parameter_bytes=64) for _ in layers
    )
    placement, rank = [], 0
    for s, (_, replicas) in enumerate(stages):
        for r in range(replicas):
            placement.append(Placement(stage=s, replica=r, rank=rank, node=0, device=rank))
            rank += 1
    values = {
        "profile": Profile(graph=graph, costs=costs, microbatch_size=4),
        "cluster": Cluster(name="c", levels=(Level(name="l", count=rank, bandwidth_bytes_per_s=1e9),)),
        "schedule": ScheduleChoice(),
        "stages": tuple(StagePlan(layers=tuple(names), replicas=n) for names, n in stages),
        "placement": tuple(placement),
        "prediction": Prediction(period_s=1.0, samples_per_s=1.0),
    }
    return Plan(**{**values, **changes})


CHAIN = [layer("x", kind="Input"), layer("a", "x"), layer("b", "a"), layer("c", "b")]


def test_ranks_and_edges():
    topology = topology_of(plan_of(CHAIN, [(["x", "a"], 2), (["b"], 1), (["c"], 1)]))
    assert topology.ranks == ((0, 1), (2,), (3,))
    assert topology.edges == ((0, 1), (1, 2))
    assert topology.no_gradient == frozenset()
    assert (topology.replicas, topology.round) == ((2, 1, 1), 2)


def test_skip_connections_have_their_own_edge():
    layers = [*CHAIN[:3], layer("c", "b", "a", kind="add")]
    topology = topology_of(plan_of(layers, [(["x", "a"], 1), (["b"], 1), (["c"], 1)]))
    assert topology.edges == ((0, 1), (0, 2), (1, 2))


def test_no_gradient_goes_back_over_integers_and_model_inputs():
    layers = [
        layer("x", kind="Input"),
        layer("mask", kind="Input", out=INDEX),
        layer("a", "x"),
        layer("b", "a", "mask"),
    ]
    topology = topology_of(plan_of(layers, [(["x", "mask"], 1), (["a"], 1), (["b"], 1)]))
    assert topology.edges == ((0, 1), (0, 2), (1, 2))
    assert topology.no_gradient == {(0, 1), (0, 2)}


def test_no_gradient_goes_back_into_frozen_stages():
    layers = [layer("x", kind="Input"), layer("a", "x", trainable=False), layer("b", "a"), layer("c", "b")]
    plan = plan_of(layers, [(["x", "a"], 1), (["b"], 1), (["c"], 1)])
    assert topology_of(plan).no_gradient == {(0, 1)}
    assert violations(program_of(plan, 6)) == []


def test_recomputation_of_single_stages_comes_from_the_plan():
    plan = plan_of(CHAIN, [(["x", "a"], 1), (["b"], 1), (["c"], 1)])
    stages = (StagePlan(layers=("x", "a"), recompute=True), *plan.stages[1:])
    changed = dataclasses.replace(plan, stages=stages)
    assert [slots.saved for slots in program_of(changed, 6).slots] == [1, 2, 1]


def test_a_placement_must_be_complete():
    plan = plan_of(CHAIN, [(["x", "a"], 2), (["b", "c"], 1)])
    place = Placement(stage=1, replica=1, rank=3, node=0, device=3)
    with pytest.raises(
        InputError, match=r"places replica 1 of stage 0 nowhere; .* replica 1 of stage 1, which has fewer"
    ):
        topology_of(
            plan_of(CHAIN, [(["x", "a"], 2), (["b", "c"], 1)], placement=(*plan.placement[::2], place))
        )
    with pytest.raises(InputError, match="twice"):
        topology_of(plan_of(CHAIN, [(["x", "a", "b", "c"], 1)], placement=plan.placement[:1] * 2))
