"""The partitioner against exhaustive search, which shares nothing with it but the cost model's words."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmpi.errors import InputError
from pdmpi.graph import Layer, LayerGraph, Ref, TensorSpec
from pdmpi.plan.cluster import Cluster, Device, Level
from pdmpi.plan.cuts import cuts_of
from pdmpi.plan.partition import copies_of, partition, plan_of, variants
from pdmpi.plan.plan import Plan, ScheduleChoice, StagePlan
from pdmpi.plan.predict import Estimate, estimate
from pdmpi.plan.pricing import Problem
from pdmpi.plan.profile import CUDA_GRAPHS, LayerCost, Profile
from pdmpi.plan.search import search


@st.composite
def profiles(draw, max_layers: int = 8) -> Profile:
    """A random graph: a chain with skips, forks and joins; costs over orders of magnitude, zeros too."""
    count = draw(st.integers(1, max_layers))
    layers = [Layer(name="x", kind="Input", outputs=(TensorSpec(shape=(4, 2), requires_grad=False),))]
    costs = [LayerCost(forward_s=0.0, backward_s=0.0, output_bytes=32)]
    for i in range(count):
        back = draw(st.lists(st.integers(0, i), min_size=1, max_size=2, unique=True))
        chain = draw(st.booleans())
        inputs = tuple(Ref(layers[i if chain and k == 0 else b].name) for k, b in enumerate(back))
        elements = draw(st.sampled_from([0, 1, 25, 1000, 40000]))
        parameters = draw(st.sampled_from([0, 4000, 400_000])) if i else 4000
        layers.append(
            Layer(
                name=f"l{i}",
                kind="Linear",
                inputs=tuple(dict.fromkeys(inputs)),
                outputs=(TensorSpec(shape=(4, elements)),),
                parameters=(f"l{i}.w",) if parameters else (),
                trainable=draw(st.booleans()) or i == 0,
            )
        )
        costs.append(
            LayerCost(
                forward_s=draw(st.sampled_from([0.0, 1e-4, 5e-4, 1e-3])),
                backward_s=draw(st.sampled_from([0.0, 1e-4, 1.5e-3])) if i else 1e-4,
                output_bytes=16 * elements,
                parameter_bytes=parameters,
                buffer_bytes=draw(st.sampled_from([0, 100])),
                saved_bytes=draw(st.sampled_from([0, 16 * elements, 50_000])),
                workspace_bytes=draw(st.sampled_from([0, 0, 100_000])),
                split_bytes=draw(st.sampled_from([0, 40_000])),
                forward_workspace_bytes=draw(st.sampled_from([0, 0, 60_000, 90_000])),
            )
        )
    graph = LayerGraph(tuple(layers), (Ref(layers[-1].name),))
    return Profile(
        graph=graph,
        costs=tuple(costs),
        microbatch_size=4,
        optimizer_state_factor=draw(st.sampled_from([0.0, 2.0])),
        update_s_per_byte=draw(st.sampled_from([0.0, 1e-10])),
        accumulate_s_per_byte=draw(st.sampled_from([0.0, 2e-10])),
        machine={CUDA_GRAPHS: draw(st.sampled_from(["yes", "no"]))},
    )


@st.composite
def clusters(draw, levels: int, limited: bool) -> Cluster:
    shapes = [(n,) for n in range(1, 7)] if levels == 1 else [(2, 2), (3, 2), (2, 3)]
    counts = draw(st.sampled_from(shapes))
    total = math.prod(counts)
    found = tuple(
        Level(
            name=f"level{i}",
            count=count,
            bandwidth_bytes_per_s=draw(st.sampled_from([1e7, 1e8, 1e9])),
            latency_s=draw(st.sampled_from([0.0, 1e-4])),
            shared=draw(st.booleans()),
            allreduce_efficiency=draw(st.sampled_from([1.0, 0.5, 2.0])),
            allreduce_work_s_per_byte=draw(st.sampled_from([0.0, 0.0, 2e-9])),
        )
        for i, count in enumerate(counts)
    )
    memory = draw(st.sampled_from([300_000, 1_000_000, 3_000_000])) if limited else 0
    devices = [Device(memory_bytes=memory)]
    if draw(st.booleans()):
        speeds = draw(st.lists(st.sampled_from([0.5, 1.0]), min_size=total, max_size=total))
        devices = [Device(memory_bytes=memory, relative_speed=speed) for speed in speeds]
    return Cluster(name="drawn", levels=found, devices=tuple(devices), devices_per_node=counts[0])


def nested_cuts(profile: Profile) -> list[list[frozenset[str]]]:
    """All chains of downward-closed sets, from nothing to everything, as lists of stages."""
    layers = profile.graph.layers
    inputs = {layer.name for layer in layers if layer.kind == "Input"}
    rest = [layer for layer in layers if layer.kind != "Input"]
    closed = []
    for size in range(1, len(rest) + 1):
        for chosen in itertools.combinations(rest, size):
            names = {layer.name for layer in chosen} | inputs
            if all(ref.layer in names for layer in chosen for ref in layer.inputs):
                closed.append(frozenset(names))
    full = frozenset(layer.name for layer in layers)
    chains: list[list[frozenset[str]]] = []

    def extend(done: list[frozenset[str]], last: frozenset[str]) -> None:
        if last == full:
            chains.append(done)
        for after in closed:
            if last < after:
                extend([*done, after - last], after)

    extend([], frozenset())
    return chains


def device_choices(cluster: Cluster) -> list[tuple[int, ...]]:
    """All devices, or without some kinds of them."""
    kinds = sorted({(d.relative_speed, d.memory_bytes) for d in cluster.devices})
    found = []
    for size in range(1, len(kinds) + 1):
        for kept in itertools.combinations(kinds, size):
            order = tuple(
                i
                for i in range(cluster.num_devices)
                if (cluster.device(i).relative_speed, cluster.device(i).memory_bytes) in kept
            )
            if order not in found:
                found.append(order)
    return found


def compositions(total: int, parts: int):
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def exhaustive(profile: Profile, cluster: Cluster, choice: ScheduleChoice, recompute: str) -> float:
    """The smallest steady period over everything the planner says it searches."""
    best = math.inf
    chains = nested_cuts(profile)
    for order in device_choices(cluster):
        full = len(order) == cluster.num_devices
        for copies in copies_of(cluster) if full else [1]:
            part = len(order) // copies
            for stages in chains:
                for used in range(len(stages), part + 1):
                    for shape in compositions(used, len(stages)):
                        if choice.name != "pipedream" and any(
                            choice.microbatches % (m * copies) for m in shape
                        ):
                            continue
                        best = min(
                            best,
                            period(profile, cluster, choice, stages, shape, order, copies, part, recompute),
                        )
    return best


def period(profile, cluster, choice, stages, shape, order, copies, part, recompute) -> float:
    starts = [sum(shape[:s]) for s in range(len(shape))]
    devices = [
        [order[c * part + p] for p in range(a, a + m) for c in range(copies)]
        for a, m in zip(starts, shape, strict=True)
    ]
    plan = [
        StagePlan(layers=tuple(sorted(names)), replicas=m * copies)
        for names, m in zip(stages, shape, strict=True)
    ]
    fitting = [list(range(len(plan)))]
    for again in fitting:
        found = estimate(profile, cluster, choice, plan, devices, copies)
        over = [
            s
            for s, stage in enumerate(found.stages)
            if any(0 < cluster.device(d).memory_bytes < stage.memory_bytes for d in devices[s])
        ]
        if not over:
            return found.steady_s
        if recompute != "auto" or not again:
            return math.inf
        for s in over:
            if plan[s].recompute:
                return math.inf
            plan[s] = replace(plan[s], recompute=True)
        fitting.append(again)
    return math.inf


def check(profile: Profile, cluster: Cluster, choice: ScheduleChoice, recompute: str = "never") -> None:
    wanted = exhaustive(profile, cluster, choice, recompute)
    problem = Problem(cuts=cuts_of(profile), cluster=cluster, choice=choice, recompute=recompute)
    best = search(variants(problem))
    if best is None:
        assert wanted == math.inf
        with pytest.raises(InputError, match="does not fit"):
            partition(profile, cluster, replace(choice, recompute=recompute))
        return
    assert best[1].period_s == pytest.approx(wanted, rel=1e-9)
    plan = plan_of(*best)
    found = estimate(profile, cluster, plan.schedule, plan.stages, plan.devices, plan.copies)
    assert found.steady_s == pytest.approx(wanted, rel=1e-9)
    assert_fits(found, plan, cluster)


def assert_fits(found: Estimate, plan: Plan, cluster: Cluster) -> None:
    for stage, group in zip(found.stages, plan.devices, strict=True):
        for device in group:
            limit = cluster.device(device).memory_bytes
            assert not limit or stage.memory_bytes <= limit


SMALL = settings(max_examples=40, deadline=None)


@SMALL
@given(profiles(5), clusters(1, False))
def test_flat(profile, cluster):
    check(profile, cluster, ScheduleChoice())


@SMALL
@given(profiles(4), clusters(2, False))
def test_two_levels(profile, cluster):
    check(profile, cluster, ScheduleChoice())


@SMALL
@given(profiles(5), clusters(1, True), st.sampled_from([0, 1]))
def test_flat_with_memory(profile, cluster, extra):
    check(profile, cluster, ScheduleChoice(extra_in_flight=extra))


@SMALL
@given(profiles(4), clusters(2, True), st.sampled_from(["never", "auto"]))
def test_two_levels_with_memory(profile, cluster, recompute):
    check(profile, cluster, ScheduleChoice(), recompute)


@settings(max_examples=15, deadline=None)
@given(profiles(4), clusters(1, True), st.sampled_from(["2bw", "1f1b", "gpipe"]), st.integers(1, 8))
def test_other_schedules(profile, cluster, name, microbatches):
    check(profile, cluster, ScheduleChoice(name=name, microbatches=microbatches))


@settings(max_examples=15, deadline=None)
@given(profiles(4), clusters(1, True), st.integers(1, 8), st.integers(0, 1))
def test_what_a_search_takes_zb_h1_to_hold_is_enough(profile, cluster, microbatches, extra):
    """It does not know the replicas of the input stage, so a plan that fits may be left out."""
    choice = ScheduleChoice(name="zb-h1", microbatches=microbatches, extra_in_flight=extra)
    best = search(variants(Problem(cuts=cuts_of(profile), cluster=cluster, choice=choice)))
    if best is None:
        return
    plan = plan_of(*best)
    found = estimate(profile, cluster, plan.schedule, plan.stages, plan.devices, plan.copies)
    assert found.steady_s >= exhaustive(profile, cluster, choice, "never") * (1 - 1e-9)
    assert_fits(found, plan, cluster)


@settings(max_examples=4, deadline=None)
@given(profiles(8), clusters(1, False))
def test_flat_eight_layers(profile, cluster):
    check(profile, cluster, ScheduleChoice())
