"""The layer graph that a person sees, patterns of leaves, and errors that say what to do."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chain import Chain, cut, total
from model_cases import CASES, ROWS, TinyGPT
from test_partition import assert_equal, close, traced_case
from torch import Tensor, nn

from pdmpi.config.run import ModelConfig
from pdmpi.errors import InputError
from pdmpi.graph import Ref
from pdmpi.model.build import build_model, build_stage
from pdmpi.model.factory import load_factory
from pdmpi.model.trace import TracedModel, trace_model


def trace(name: str, example: Any, **options: Any) -> TracedModel:
    return trace_model(ModelConfig(factory=f"{__name__}:{name}", **options), example)


def test_layers_of_a_sequential_are_what_the_user_put_in_it() -> None:
    graph = traced_case("sequential").graph
    assert [(layer.name, layer.kind) for layer in graph.layers] == [
        ("input", "Input"), ("0", "Conv2d"), ("1", "ReLU"), ("2", "Block"), ("3.0", "Block"),
        ("3.1", "MaxPool2d"), ("4", "Flatten"), ("5", "LayerNorm"), ("6", "Linear"),
    ]  # fmt: skip
    assert graph.outputs == (Ref("6"),)
    assert graph.layers[3].parameters == ("2.conv.weight", "2.bn.weight", "2.bn.bias")
    assert not graph.layers[0].outputs[0].requires_grad
    assert all(layer.outputs[0].requires_grad for layer in graph.layers[1:])


def test_layers_of_a_transformer_have_names_that_a_person_knows() -> None:
    graph = traced_case("gpt").graph
    names = [layer.name for layer in graph.layers]
    assert names[:10] == [
        "ids", "tok", "pos", "add", "blocks.0.ln", "blocks.0.attn.qkv", "blocks.0.attn.matmul",
        "blocks.0.attn.out", "add_1", "blocks.0.ff",
    ]  # fmt: skip
    assert graph.ties == (("tok.weight", "head.weight"),)
    assert graph.layers[graph.index["pos"]].inputs == ()
    assert graph.layers[graph.index["add"]].inputs == (Ref("tok"), Ref("pos"))


def test_patterns_keep_submodules_whole() -> None:
    config = ModelConfig(factory="model_cases:TinyGPT", leaves=("blocks.*.attn", "norm"))
    traced = trace_model(config, CASES["gpt"].batch(2))
    names = [layer.name for layer in traced.graph.layers]
    assert "blocks.1.attn" in names
    assert not any(name.startswith("blocks.1.attn.") for name in names)
    with pytest.raises(InputError, match=r"leaves = \['block\.\*'\] matches no submodule"):
        trace_model(ModelConfig(factory="model_cases:TinyGPT", leaves=("block.*",)), CASES["gpt"].batch(2))


def test_shared_modules_and_weights_are_named_once() -> None:
    graph = traced_case("shared").graph
    by_name = {layer.name: layer for layer in graph.layers}
    assert by_name["mix"].parameters == by_name["mix_1"].parameters == (
        "mix.weight", "mix.bias", "again.weight", "again.bias",
    )  # fmt: skip
    assert by_name["tanh_1"].parameters == ("embed.weight",)
    assert by_name["add"].parameters == ("bias",)
    assert ("mix.weight", "again.weight") in graph.ties


def test_gradients_stop_where_nothing_is_trained() -> None:
    graph = traced_case("frozen").graph
    by_name = {layer.name: layer for layer in graph.layers}
    assert not by_name["front.0"].trainable
    assert not by_name["front.1"].outputs[0].requires_grad
    assert by_name["middle"].trainable
    assert not by_name["teacher"].outputs[0].requires_grad
    assert by_name["head"].outputs[0].requires_grad


def test_integer_and_boolean_boundaries() -> None:
    graph = traced_case("dictionary").graph
    kinds = {spec.dtype for layer in graph.layers for spec in layer.outputs}
    assert {"int64", "bool", "float64"} <= kinds
    assert not [
        layer.name
        for layer in graph.layers
        for spec in layer.outputs
        if spec.dtype != "float64" and spec.requires_grad
    ]


@pytest.mark.parametrize("name", ["diamonds", "gpt", "residual", "shapes", "dictionary", "in_place"])
def test_stages_that_are_not_contiguous(name: str) -> None:
    """Any assignment that follows the edges works, whatever the order of the layers."""
    traced, batch = traced_case(name), CASES[name].batch(ROWS)
    expected = Chain(traced, cut(traced, []))
    loss, _ = expected.step(batch)
    draw = random.Random(name)
    for _ in range(4):
        stage_of: dict[str, int] = {}
        for layer in traced.graph.layers:
            first = max((stage_of[ref.layer] for ref in layer.inputs), default=0)
            stage_of[layer.name] = 0 if layer.kind == "Input" else draw.randint(first, min(first + 1, 3))
        used = sorted({*stage_of.values()})
        stages = [[n for n, s in stage_of.items() if s == stage] for stage in used]
        chain = Chain(traced, stages)
        found, _ = chain.step(batch)
        assert close(found, loss)
        assert_equal(chain, expected.gradients(), expected.buffers())


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(self.norm(x)))


def test_a_module_that_is_called_twice_in_one_stage() -> None:
    traced = trace("Twice", torch.zeros(4, 4))
    x = torch.randn(4, 4)
    model = build_model(traced)
    stage = build_stage(traced, traced.graph.index)
    assert torch.equal(model(x), traced.unflatten(stage(traced.flatten(x), 0)))
    assert torch.equal(model.norm.running_var, stage.get_buffer("norm.running_var"))
    assert int(stage.get_buffer("norm.num_batches_tracked")) == 2


class Stateful(nn.Module):
    """Keeps its hidden state from one minibatch to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.hidden: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y, hidden = self.lstm(x, self.hidden)
        self.hidden = tuple(h.detach() for h in hidden)
        return y


def truncated() -> nn.Module:
    return nn.ModuleDict({"net": Carrier()})["net"]


class Carrier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory, self.head = Stateful(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(x))


def test_a_state_that_is_carried_on_stays_in_its_layer() -> None:
    traced = trace("truncated", torch.zeros(2, 3, 4))
    assert "self.hidden" in traced.opaque["memory"]
    assert traced.module.memory.hidden is None
    model, stage = build_model(traced), build_stage(traced, traced.graph.index)
    for _ in range(3):
        x = torch.randn(2, 3, 4)
        assert torch.equal(model(x), traced.unflatten(stage(traced.flatten(x), 0)))


def diamonds(count: int = 3) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2 * count))

        def forward(self, x: Tensor) -> Tensor:
            for i in range(count):
                x = self.layers[2 * i](x) + self.layers[2 * i + 1](x)
            return x

    return Net()


class BadRoot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if y.sum() > 0:
            y = y * 2
        return y


class BadBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class NoTensor(nn.Module):
    def forward(self, x: Tensor) -> int:
        return int(x.shape[0])


class OwnTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.w, self.w


def broken() -> nn.Module:
    raise KeyError("width")


def nothing() -> int:
    return 3


@pytest.mark.parametrize(
    ("name", "example", "words"),
    [
        ("BadRoot", torch.zeros(2, 3), ["the model's own forward", "if y.sum() > 0", "leaves = "]),
        ("BadBatch", torch.zeros(2, 3), ["module 'inner.0' of BadBatch", "2x3 and 7x3"]),
        ("NoTensor", torch.zeros(2, 3), ["returns no tensor"]),
        ("OwnTensor", torch.zeros(2, 2), ["returns its tensor 'w' itself"]),
        ("broken", torch.zeros(2, 2), ["factory 'test_trace:broken' failed: KeyError: 'width'"]),
        ("nothing", torch.zeros(2, 2), ["returned int, not a torch module"]),
        ("missing", torch.zeros(2, 2), ["has no callable 'missing'"]),
        ("Twice", (torch.zeros(2, 4), torch.zeros(2)), ["forward does not take the data set's input"]),
        ("Twice", {"y": torch.zeros(2, 4)}, ["unexpected keyword argument 'y'"]),
    ],
)  # fmt: skip
def test_errors_say_where_and_what_to_do(name: str, example: Any, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        trace(name, example)
    text = str(caught.value)
    assert "\n" not in text
    assert not [word for word in words if word not in text], text


def test_factories_are_found_by_name() -> None:
    assert load_factory("torch.nn:Linear") is nn.Linear
    with pytest.raises(InputError, match=r"did you mean 'Linear'"):
        load_factory("torch.nn:Linaer")
    with pytest.raises(InputError, match="cannot import 'no_such_module'"):
        load_factory("no_such_module:thing")


def test_unknown_layers_are_refused_with_the_nearest() -> None:
    traced = traced_case("residual")
    with pytest.raises(InputError, match="did you mean 'stem'"):
        build_stage(traced, ["stme"])


def test_the_fingerprint_does_not_depend_on_the_batch() -> None:
    config = ModelConfig(factory="model_cases:TinyGPT")
    graphs = [trace_model(config, CASES["gpt"].batch(rows)).graph for rows in (2, 5)]
    assert graphs[0].fingerprint == graphs[1].fingerprint
    other = ModelConfig(factory="model_cases:TinyGPT", args={"depth": 1})
    assert trace_model(other, CASES["gpt"].batch(2)).graph.fingerprint != graphs[0].fingerprint


def test_tracing_leaves_no_trace() -> None:
    traced = traced_case("gpt")
    for module in traced.module.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in module.__dict__
    assert isinstance(traced.module, TinyGPT)
    assert torch.is_grad_enabled()
    names = [name for name, _ in itertools.chain(traced.module.named_parameters())]
    assert names == [name for name, _ in TinyGPT().named_parameters()]


class Odd(nn.Module):
    """Computes with the batch size in a way that is not linear."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * (1.0 / len(x))


def test_a_batch_size_that_is_built_in_is_noted() -> None:
    traced = trace("Odd", torch.zeros(2, 4))
    assert traced.notes[0].startswith("only batches of 2 rows run")


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = NoiseBlock(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))


class NoiseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.training:
            return F.softmax(x + torch.rand_like(x), -1)
        return x.tanh()


def test_a_module_that_differs_in_evaluation_becomes_one_layer() -> None:
    traced = trace("Noise", torch.zeros(2, 4))
    assert "evaluation" in traced.opaque["block"]
    x = torch.randn(2, 4)
    model, stage = build_model(traced).eval(), build_stage(traced, traced.graph.index).eval()
    assert torch.equal(model(x), traced.unflatten(stage(traced.flatten(x), 0), training=False))
    assert total(model(x)).isfinite()


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4))


def test_layers_that_must_not_run_twice_refuse_to() -> None:
    traced = trace("spectral", torch.zeros(3, 4))
    names = [layer.name for layer in traced.graph.layers]
    values = traced.flatten(torch.randn(3, 4))
    with pytest.raises(InputError, match=r"0\.parametrizations\.weight\.0\._u.*recompute = \"never\""):
        build_stage(traced, names)(values, 0, recompute=True)
    stage = build_stage(traced, ["1"], last=True)
    assert stage({Ref("0"): torch.randn(3, 4)}, 0, recompute=True)
    assert int(stage.get_buffer("1.num_batches_tracked")) == 0
