"""The zoo: published sizes, every configuration, and partitions equal to the whole."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from chain import Chain, cut, total
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_partition import assert_equal, close

from pdmpi.config.load import load_config
from pdmpi.model.build import build_model
from pdmpi.model.example import cast_floating, dtype_of, example_batch
from pdmpi.model.factory import load_factory
from pdmpi.model.trace import TracedModel, trace_model
from pdmpi.model.tree import tensors_of

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = sorted(path.stem for path in CONFIGS.glob("*-small.toml"))

PUBLISHED = {
    "alexnet:alexnet": ({}, 61_100_840),
    "vgg:vgg16": ({}, 138_357_544),
    "resnet:resnet50": ({}, 25_557_032),
    "inception:inception_v3": ({}, 27_161_264),
    "awd_lm:awd_lm": ({}, 24_221_600),
    "awd_lm:awd_lm WikiText-2": ({"vocabulary": 33278}, 33_556_078),
    "gpt2:gpt2": ({}, 124_439_808),
    "bert:bert": ({}, 109_514_298),
    # NVIDIA's GNMT with one embedding; PipeDream's profiles of GNMT-8 and GNMT-16 leave out
    # the 1,025 parameters that normalise the attention.
    "gnmt:gnmt8 shared": ({"share_embedding": True}, 160_671_297),
    "gnmt:gnmt8": ({}, 193_765_952 + 1025),
    "gnmt:gnmt16": ({}, 277_717_568 + 1025),
    # No count was published: frames 2,048,500; words 6,297,000; layers 6,008,000 and
    # 10,008,000; classifier 12,606,594.
    "s2vt:s2vt": ({}, 2_048_500 + 6_297_000 + 6_008_000 + 10_008_000 + 12_606_594),
}


def parameters(name: str, **args: object) -> int:
    with torch.device("meta"):
        model = load_factory(f"pdmpi.model.zoo.{name.split()[0]}")(**args)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_number_of_parameters(name: str) -> None:
    args, count = PUBLISHED[name]
    assert parameters(name, **args) == count


@pytest.mark.parametrize(("filters", "millions"), [(208, 81.5), (416, 319.0), (544, 542.7)])
def test_amoebanet_has_the_sizes_of_gpipes_table(filters: int, millions: float) -> None:
    count = parameters("amoebanet:amoebanet_d", layers=18, filters=filters)
    assert round(count / 1e6, 1) == millions


@functools.cache
def traced_small(name: str) -> tuple[TracedModel, object]:
    config = load_config(CONFIGS / f"{name}.toml")
    factory = load_factory(config.model.factory)
    args = dict(config.model.args)
    if "dropout" in factory.__code__.co_varnames:
        args["dropout"] = 0.0
    rows = config.train.model_copy(update={"minibatch_size": 2})
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"args": args}), "train": rows}
    )
    source, _ = example_batch(config)
    return trace_model(config.model, source, seed=3, dtype=torch.float64), cast_floating(
        source, torch.float64
    )


@pytest.mark.parametrize("name", SMALL)
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_partitions_equal_the_whole(name: str, data: st.DataObject) -> None:
    traced, batch = traced_small(name)
    assert not traced.notes
    assert not traced.opaque
    model = build_model(traced)
    output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    loss = total(output)
    loss.backward()
    cuts = data.draw(st.lists(st.integers(1, len(traced.graph) - 1), max_size=3, unique=True))
    chain = Chain(traced, cut(traced, cuts))
    found, result = chain.step(batch)
    assert close(found, loss)
    assert all(map(close, tensors_of(result), tensors_of(output)))
    whole = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_equal(chain, whole, dict(model.named_buffers(remove_duplicate=False)))


@pytest.mark.parametrize("name", SMALL)
def test_small_models_train_and_evaluate(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.toml")
    source, target = example_batch(config)
    traced = trace_model(config.model, source, dtype=dtype_of(config))
    chain = Chain(traced, cut(traced, [len(traced.graph) // 2]))
    criterion = load_factory(config.loss.factory)(**config.loss.args)
    values = traced.flatten(cast_floating(source, dtype_of(config)))
    for training in (True, False):
        held = dict(values)
        for stage in chain.stages:
            stage.train(training)
            held.update(stage({ref: held[ref] for ref in stage.inputs}, 0))
        loss = criterion(traced.unflatten(held, training), target)
        assert torch.isfinite(loss)
        if training:
            loss.backward()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_configuration_traces_without_memory(path: Path) -> None:
    config = load_config(path)
    rows = min(config.train.minibatch_size, 2)
    config = config.model_copy(update={"train": config.train.model_copy(update={"minibatch_size": rows})})
    if "digits" in path.stem:
        pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    source, _ = example_batch(config)
    traced = trace_model(config.model, source)
    assert all(t.is_meta for t in traced.module.state_dict().values())
    held = [name for layer in traced.graph.layers for name in layer.parameters]
    assert set(held) <= set(traced.module.state_dict())
    assert {id(p) for p in traced.module.parameters()} <= {
        id(t) for layer in traced.graph.layers for t in traced.tensors_of(layer.name)
    }
