"""Where graphs may be cut: all downward-closed sets of small ones, chains of large ones."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
from hypothesis import given
from plan_cases import CLUSTERS, residual_net
from test_search_exact import profiles

from pdmpi.errors import InputError
from pdmpi.graph import Layer, LayerGraph, Ref, TensorSpec
from pdmpi.plan.cluster_file import load_cluster
from pdmpi.plan.cuts import cuts_of
from pdmpi.plan.partition import partition
from pdmpi.plan.plan import StagePlan
from pdmpi.plan.predict import cut_bytes
from pdmpi.plan.profile import LayerCost, Profile


def diamonds(count: int) -> Profile:
    """``count`` diamonds in series: 2^count paths."""
    spec = TensorSpec(shape=(2, 100))
    layers = [Layer(name="x", kind="Input", outputs=(replace(spec, requires_grad=False),))]
    last = "x"
    for d in range(count):
        for side, names in (("left", (last,)), ("right", (last,)), ("join", (f"left{d}", f"right{d}"))):
            layers.append(
                Layer(name=f"{side}{d}", kind="Linear", inputs=tuple(map(Ref, names)), outputs=(spec,),
                      parameters=(f"{side}{d}.weight",))
            )  # fmt: skip
        last = f"join{d}"
    costs = [
        LayerCost(forward_s=1e-3, backward_s=2e-3, output_bytes=800, parameter_bytes=400) for _ in layers
    ]
    costs[0] = LayerCost(forward_s=0.0, backward_s=0.0, output_bytes=800)
    return Profile(graph=LayerGraph(tuple(layers), (Ref(last),)), costs=tuple(costs), microbatch_size=2)


def test_diamonds_in_series_have_few_cuts_and_plan_fast():
    profile = diamonds(25)
    start = time.process_time()
    plan = partition(profile, load_cluster(CLUSTERS / "laptop.toml"))
    assert time.process_time() - start < 5
    cuts = cuts_of(profile)
    assert cuts.complete
    assert len(cuts) == 1 + 4 * 25
    assert cuts.most_stages == 75
    assert plan.prediction.period_s > 0


def most_held(costs: list[LayerCost]) -> int:
    """The most bytes that there are during a forward: what is saved already, and what a layer needs."""
    held = [0]
    for cost in costs:
        held += [held[-1] + cost.saved_bytes + cost.forward_workspace_bytes, held[-1] + cost.saved_bytes]
    return max(held)


@given(profiles(6))
def test_sums_and_crossing_bytes_are_those_of_the_layers(profile):
    cuts = cuts_of(profile)
    graph = profile.graph
    for inner, outer in itertools.combinations(range(len(cuts)), 2):
        if not cuts.nested[inner, outer]:
            continue
        names = cuts.layers(outer, inner)
        own = [profile.costs[graph.index[name]] for name in names]
        assert cuts.forward_s[outer] - cuts.forward_s[inner] == pytest.approx(sum(c.forward_s for c in own))
        assert cuts.saved_bytes[outer] - cuts.saved_bytes[inner] == sum(c.saved_bytes for c in own)
        assert cuts.split_bytes[outer] - cuts.split_bytes[inner] == sum(c.split_bytes for c in own)
        assert cuts.workspace_bytes[inner, outer] == max(c.workspace_bytes for c in own)
        assert cuts.graph_bytes[inner, outer] == most_held(own) - sum(c.saved_bytes for c in own)
        if inner == 0 and outer < len(cuts) - 1:
            rest = cuts.layers(len(cuts) - 1, outer)
            sent, returned = cut_bytes(profile, [StagePlan(layers=names), StagePlan(layers=rest)])[0]
            assert (cuts.sent_bytes[outer], cuts.returned_bytes[outer]) == (sent, returned)


def test_layers_that_share_a_parameter_stay_in_one_stage():
    net = residual_net()
    tied = replace(net, graph=replace(net.graph, ties=(("block1.conv.weight", "block2.conv.weight"),)))
    plan = partition(tied, load_cluster(CLUSTERS / "laptop.toml"), shape=(1, 1, 1))
    assert any({"block1.conv", "block2.conv"} <= set(stage.layers) for stage in plan.stages)
    ends = replace(net, graph=replace(net.graph, ties=(("block0.conv.weight", "head.weight"),)))
    with pytest.raises(
        InputError, match=r"1 at most since layers 'block0.conv' and 'head' share a parameter"
    ):
        partition(ends, load_cluster(CLUSTERS / "laptop.toml"), shape=(1, 1))


def test_a_graph_over_the_limit_keeps_chains_of_cuts():
    profile = diamonds(25)
    few = cuts_of(profile, limit=90)
    assert not few.complete
    assert few.is_chain
    assert len(few) == 76
