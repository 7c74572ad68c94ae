"""Stages that go through torch's compiler train as one process does, or say why they cannot.

The compiler's front follows the calls and their gradients; its kernels, which take minutes to make on a
CPU, are left to the GPU's tests.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from harness import assert_same, make_plan, run_config, serialise_forwards, train_local
from oracle import replay
from torch import Tensor, nn

from pdmpi.config.run import ModelConfig, RunConfig
from pdmpi.errors import InputError, PdmpiError
from pdmpi.model import compiled, measure
from pdmpi.model.build import build_stage
from pdmpi.model.compiled_costs import shared_out
from pdmpi.model.trace import trace_model
from pdmpi.plan.profile import LayerCost
from pdmpi.runtime.profiling import profile_run


@pytest.fixture(autouse=True)
def _without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    serialise_forwards(monkeypatch)
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(
        torch, "compile", functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    )
    monkeypatch.setattr(compiled.shutil, "which", lambda name: "/there")
    yield
    torch._dynamo.reset()


def configured(model: str, schedule: str = "pipedream", microbatches: int = 1, **train: Any) -> RunConfig:
    found = run_config(model, schedule, microbatches, **train)
    return found.model_copy(update={"runtime": found.runtime.model_copy(update={"compile": True})})


@pytest.mark.parametrize(("model", "schedule", "parts", "replicas", "recompute"), [
    ("conv", "pipedream", 1, [1, 1], "never"),
    ("sequence", "gpipe", 2, [1, 1], "always"),
], ids=str)  # fmt: skip
def test_equals_one_process(
    model: str, schedule: str, parts: int, replicas: list[int], recompute: str
) -> None:
    config = configured(model, schedule, parts)
    chosen = config.schedule.model_copy(update={"recompute": recompute})
    config = config.model_copy(update={"schedule": chosen})
    plan = make_plan(config, replicas)
    expected = replay(config, plan, [48 // config.train.minibatch_size])
    for state in train_local(config, plan):
        assert_same(state, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= len(replicas)


def test_two_part_backwards_are_refused() -> None:
    config = configured("conv", "zb-h1", 4)
    message = r"compile = true, but schedule 'zb-h1' runs its backward in two parts; set it to false"
    with pytest.raises(InputError, match=message):
        train_local(config, make_plan(config, [1, 1]))


def test_a_machine_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with pytest.raises(InputError, match=r"compile = true, but there is no C\+\+ compiler"):
        train_local(configured("conv"), make_plan(configured("conv"), [1, 1]))


class Breaks(nn.Module):
    """What the compiler would have to leave its graph for."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return torch.relu(x)


def test_a_layer_that_cannot_be_compiled_is_refused() -> None:
    config = configured("conv")
    named = config.model.model_copy(update={"factory": "test_compiled:breaking"})
    config = config.model_copy(update={"model": named})
    message = r"\[runtime\] compile: Call to `torch\._dynamo\.graph_break\(\)`.*; set it to false$"
    with pytest.raises(PdmpiError, match=message):
        train_local(config, make_plan(config, [1, 1]))


def breaking() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), Breaks(), nn.Linear(16, 10))


def many() -> nn.Module:
    """More calls of different kinds between draws than the compiler makes of one function."""
    widths = range(4, 15)
    layers = [(nn.Linear(a, a + 1), nn.Dropout(0.1), nn.BatchNorm1d(a + 1)) for a in widths]
    return nn.Sequential(*(layer for triple in layers for layer in triple))


def test_every_run_of_calls_between_draws_is_one_call_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without gradients, and where a recomputation leaves the statistics alone."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile.func, backend="eager"))
    assert num_graphs_of_an_equal_stage("many") == 2 * 12


class Methods(nn.Module):
    """Operators, methods of tensors and functions between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.one(x).relu()
        y += x
        z = torch.cat([y, self.two(y).sigmoid()], dim=1)[:, 2:6]
        return (y - z).transpose(0, 1).reshape(-1) * 2


def test_methods_of_tensors_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11's compiler takes them from a function, but not from an attribute of an object."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile.func, backend="eager"))
    assert num_graphs_of_an_equal_stage("Methods") == 2


def num_graphs_of_an_equal_stage(factory: str) -> int:
    """Return how many graphs a stage was compiled to that does what it does uncompiled."""
    traced = trace_model(ModelConfig(factory=f"test_compiled:{factory}"), torch.zeros(5, 4))
    plain, stage = (build_stage(traced, traced.graph.index, compiles=compiles) for compiles in (False, True))
    values = traced.flatten(torch.randn(5, 4))
    for module in (plain, stage):
        with torch.no_grad():
            module(values, 0)
        traced.unflatten(module(values, 0, recompute=True)).square().sum().backward()
    for (name, one), other in zip(plain.named_parameters(), stage.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name
    for (name, one), other in zip(plain.named_buffers(), stage.buffers(), strict=True):
        assert torch.equal(one, other), name
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_a_profile_is_of_what_the_compiler_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer has its part of the time and memory that all of them take as one compiled call."""
    config = configured("conv_without_draws")
    made: list[tuple[list[LayerCost], LayerCost]] = []

    def noting(costs: Sequence[LayerCost], whole: LayerCost) -> list[LayerCost]:
        made.append((list(costs), whole))
        return shared_out(costs, whole)

    monkeypatch.setattr(measure, "shared_out", noting)
    profile = profile_run(config, budget_s=0.5)
    ((alone, whole),) = made
    found = [cost for cost in profile.costs if cost.forward_s]
    assert len(found) == len([cost for cost in alone if cost.forward_s]) > 3
    for name in ("forward_s", "backward_s"):
        assert sum(getattr(cost, name) for cost in profile.costs) == pytest.approx(getattr(whole, name))
    assert sum(cost.saved_bytes for cost in profile.costs) == pytest.approx(whole.saved_bytes, abs=len(found))
    assert [c.parameter_bytes for c in found] == [c.parameter_bytes for c in alone if c.forward_s]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


def test_a_profile_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with pytest.raises(InputError, match="compile = true, but there is no C"):
        profile_run(configured("conv"), budget_s=0.5)
