"""The original's text profiles: format, traps, broken lines; and its results, met or undercut."""

from __future__ import annotations

import csv

import pytest
from plan_cases import REFERENCE, needs_reference

from pdmpi.errors import InputError
from pdmpi.plan.alternatives import data_parallel_plan
from pdmpi.plan.cluster import Cluster, Level
from pdmpi.plan.cuts import cuts_of
from pdmpi.plan.imported import import_profile, parse_graph
from pdmpi.plan.partition import estimate_of, partition
from pdmpi.plan.published import Flags, published_partition, published_plan

NODE = "{} -- {} -- forward_compute_time={}, backward_compute_time={}, activation_size={}, parameter_size={}"
GOOD = [
    NODE.format("node3", "Linear(in_features=4, out_features=4, bias=True)", 1.5, 2.5, "160.000", "80.000"),
    NODE.format("node1", "Input0", 600.0, 0.0, "64.0", "0.000"),
    NODE.format("node2", "LSTM(2,  4) -- odd", 2.0, 3.0, "[160.0; 40.0; 4.0]", "400") + " -- stage_id=1",
    NODE.format("node4", "__getitem__(1)", 0.0, 0.0, "40.0", "0.000"),
    NODE.format("node5", "ReLU(inplace)", 0.25, 0.25, "160.0", "0.000"),
    "\tnode1 -- node2",
    "\tnode2 -- node3",
    "\tnode2 -- node4",
    "\tnode3 -- node5",
]


def test_the_format_and_its_traps():
    profile = parse_graph("\n".join(GOOD), microbatch_size=2)
    assert [layer.name for layer in profile.graph.layers] == ["node1", "node2", "node3", "node5"]
    assert [layer.kind for layer in profile.graph.layers] == ["Input", "LSTM", "Linear", "ReLU"]
    source, lstm, linear, relu = profile.costs
    assert (source.forward_s, source.output_bytes) == (0.0, 64)
    assert (lstm.forward_s, lstm.backward_s, lstm.output_bytes, lstm.parameter_bytes) == (
        0.002,
        0.003,
        204,
        400,
    )
    assert (linear.saved_bytes, relu.saved_bytes) == (160, 0)
    assert [str(ref) for ref in profile.graph.outputs] == ["node5:0"]
    assert [spec.nbytes for layer in profile.graph.layers for spec in layer.outputs] == [64, 204, 160, 160]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no node"),
        (["node1 - Linear"], "line 1: neither a node nor an edge"),
        ([*GOOD, "\tnode1 -- node9"], "line 10: edge to 'node9'"),
        ([*GOOD, GOOD[0]], "line 10: node 'node3' is there twice"),
        ([*GOOD, "\tnode5 -- node2"], "cycle through 'node2'"),
        ([*GOOD, "\tnode5 -- node5"], "cycle through 'node5'"),
        ([NODE.format("a", "x", "-1", 0, 1, 1)], "line 1: forward_compute_time = -1 must be finite"),
        ([NODE.format("a", "x", 0, "nan", 1, 1)], "line 1: backward_compute_time = nan must be finite"),
        ([NODE.format("a", "x", 0, 0, "[1; x]", 1)], "line 1: activation_size = 'x' is no number"),
        ([NODE.format("a", "x", 0, 0, 1, "inf")], "line 1: parameter_size = inf"),
    ],
)
def test_broken_profiles_are_refused_with_their_line(lines, message):
    with pytest.raises(InputError, match=message):
        parse_graph("\n".join(lines))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        import_profile(tmp_path / "graph.txt")
    (tmp_path / "graph.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="cannot read"):
        import_profile(tmp_path / "graph.txt")


FLAGS = {
    "acr1": Flags(),
    "noflags": Flags(boundaries=False),
    "acr1_straight": Flags(straight=True),
    "acr1_mem16": Flags(memory_bytes=16e9),
    "acr1_fewer": Flags(),
}


def cluster_of(row: dict[str, str]) -> Cluster:
    levels = []
    for part in row["levels(count@bytes_per_s;inner->outer)"].split(";"):
        count, rate = part.split("@")
        levels.append(Level(name="level", count=int(count), bandwidth_bytes_per_s=float(rate)))
    return Cluster(name=row["shape"], levels=tuple(levels), devices_per_node=levels[0].count)


def reference_rows(model: str) -> list[dict[str, str]]:
    with (REFERENCE / "reference_plans.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["model"] == model and row["status"] == "ok"]


def profile_of(model: str):
    return import_profile(REFERENCE / "profiles" / model / "graph.txt")


@needs_reference
@pytest.mark.parametrize("model", ["alexnet", "vgg16", "gnmt", "gnmt_large", "squeezenet1_0", "resnet18"])
def test_never_worse_than_the_original_under_its_own_model(model):
    cuts = cuts_of(profile_of(model))
    assert cuts.complete
    equal = 0
    for row in reference_rows(model):
        name = "pipedream2019" if row["cost_model"] == "paper_ring" else "pipedream2019-code"
        period, _ = published_partition(cuts, cluster_of(row), name, FLAGS[row["flagset"]])
        reference = float(row["predicted_time_per_minibatch(s)"])
        assert period <= reference * (1 + 1e-6), (row["shape"], row["flagset"])
        equal += abs(period - reference) <= 1e-6 * reference
    assert equal >= 20


@needs_reference
@pytest.mark.parametrize(
    ("model", "levels", "shape", "last_layer"),
    [
        ("vgg16", [(16, 1.25e9)], "15-1", "MaxPool2d"),
        ("alexnet", [(16, 1.25e9)], "15-1", "MaxPool2d"),
        ("resnet50", [(4, 1e10), (4, 1.25e9)], "16", "Linear"),
        ("resnet50", [(8, 3e10), (2, 3.125e9)], "16", "Linear"),
    ],
)
def test_the_papers_configurations(model, levels, shape, last_layer):
    profile = profile_of(model)
    found = tuple(Level(name="level", count=n, bandwidth_bytes_per_s=rate) for n, rate in levels)
    cluster = Cluster(name="paper", levels=found, devices_per_node=levels[0][0])
    plan = published_plan(profile, cluster, "pipedream2019")
    assert "-".join(str(stage.replicas) for stage in plan.stages) == shape
    index = profile.graph.index[plan.stages[0].layers[-1]]
    kinds = [layer.kind for layer in profile.graph.layers[index : index + 4]]
    assert last_layer in kinds
    if shape == "15-1":
        moved = sum(plan.prediction.link_bytes)
        assert moved < 0.25 * sum(data_parallel_plan(profile, cluster).prediction.link_bytes)


@needs_reference
@pytest.mark.parametrize("model", ["vgg16", "resnet50", "inception_v3", "gnmt_large"])
def test_no_worse_than_the_cluster_taken_as_flat(model):
    profile = profile_of(model)
    levels = (
        Level(name="pcie", count=4, bandwidth_bytes_per_s=1e10),
        Level(name="ethernet", count=4, bandwidth_bytes_per_s=1.25e9),
    )
    flat = (Level(name="flat", count=16, bandwidth_bytes_per_s=1.25e9),)
    nested = estimate_of(partition(profile, Cluster(name="nested", levels=levels, devices_per_node=4)))
    alone = estimate_of(partition(profile, Cluster(name="flat", levels=flat)))
    assert nested.steady_s <= alone.steady_s * (1 + 1e-9)


@needs_reference
@pytest.mark.parametrize("model", ["inception_v3", "nasnetalarge", "nasnetamobile"])
def test_graphs_with_too_many_cuts_plan_as_they_are(model):
    profile = profile_of(model)
    level = Level(name="pcie", count=4, bandwidth_bytes_per_s=1e10)
    plan = partition(profile, Cluster(name="flat", levels=(level,)))
    compute = sum(cost.forward_s + cost.backward_s for cost in profile.costs)
    assert plan.prediction.period_s == pytest.approx(compute / 4, rel=0.01)
    assert sorted(name for stage in plan.stages for name in stage.layers) == sorted(profile.graph.index)
