"""Weights that are made later, in part, are the weights that are made at once."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from pdmpi.config.run import ModelConfig
from pdmpi.model.build import build_model, build_stage
from pdmpi.model.deferred import Tape, cast
from pdmpi.model.trace import trace_model

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(5, 7),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "conv": lambda: nn.Conv2d(3, 8, 3, groups=1),
    "transposed": lambda: nn.ConvTranspose1d(4, 6, 3),
    "batch norm": lambda: nn.BatchNorm2d(6),
    "group norm": lambda: nn.GroupNorm(2, 6),
    "layer norm": lambda: nn.LayerNorm(6),
    "embedding": lambda: nn.Embedding(11, 6, padding_idx=0),
    "bag": lambda: nn.EmbeddingBag(9, 4, max_norm=1.0),
    "lstm": lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True, proj_size=3),
    "gru": lambda: nn.GRU(4, 5),
    "attention": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6),
    "transformer": lambda: nn.Transformer(8, 2, 2, 2, 16),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Conv1d(3, 4, 2)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    "prelu": lambda: nn.PReLU(3),
    "adaptive softmax": lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 12]),
}

FILLS: dict[str, Callable[[torch.Tensor], object]] = {
    "uniform": nn.init.uniform_,
    "normal": nn.init.normal_,
    "trunc_normal": nn.init.trunc_normal_,
    "constant": lambda t: nn.init.constant_(t, 0.3),
    "eye": nn.init.eye_,
    "xavier": nn.init.xavier_normal_,
    "kaiming": nn.init.kaiming_uniform_,
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda t: nn.init.sparse_(t, 0.5),
}


class ByHand(nn.Module):
    """Everything that people do in constructors."""

    def __init__(self) -> None:
        super().__init__()
        rates = [x.item() for x in torch.linspace(0, 0.3, 4)]
        sizes = torch.arange(3, 6).tolist()
        self.layers = nn.ModuleList(nn.Linear(s, 6) for s in sizes)
        self.tied = nn.Linear(3, 6)
        self.tied.weight = self.layers[0].weight
        self.rate = sum(rates)
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.mul_(2.0).clamp_(-0.4, 0.4)
                layer.bias[1:3] = 7.0
        self.layers[1].weight.data = torch.randn(6, 4) * 0.01
        self.layers[2].weight.data.copy_(torch.from_numpy(np.arange(30.0).reshape(6, 5)))
        self.layers[2].bias.data = self.layers[1].bias.data.clone() + torch.rand(6)
        angles = torch.arange(8.0).unsqueeze(1) * torch.exp(torch.arange(0, 6, 2) * -0.5)
        table = torch.zeros(8, 6)
        table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()
        self.register_buffer("table", table)
        self.register_buffer("host", torch.from_numpy(np.ones(3)), persistent=False)
        self.order = torch.randperm(6)
        self.plain = [torch.full((2,), float(table.max())), np.asarray(torch.ones(2).numpy())]
        generator = torch.Generator().manual_seed(41)
        self.fixed = nn.Parameter(torch.randn(4, generator=generator), requires_grad=False)
        self.fixed.no_decay = True


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.state_dict(keep_vars=True))


def taped(factory: Callable[[], nn.Module], seed: int = 1) -> tuple[nn.Module, Tape]:
    tape = Tape(seed)
    with tape.recording():
        module = factory()
    return module, tape


@pytest.mark.parametrize("name", LAYERS)
def test_each_tensor_alone_is_what_it_is_among_all(name: str) -> None:
    module, tape = taped(lambda: nn.ModuleList(LAYERS[name]() for _ in range(2)))
    names = list(tensors(module))
    storages: dict[int, torch.UntypedStorage] = {}
    together = {n: tape.realise(t.detach(), storages) for n, t in tensors(module).items()}
    random.Random(name).shuffle(names)
    again, other_tape = taped(lambda: nn.ModuleList(LAYERS[name]() for _ in range(2)))
    for n in names:
        alone = other_tape.realise(tensors(again)[n].detach())
        assert torch.equal(alone, together[n]), n
        assert alone.dtype == tensors(module)[n].dtype
        assert alone.stride() == tensors(module)[n].stride()
    real = LAYERS[name]()
    assert {n[2:] for n in names} == set(tensors(real))
    for n, t in tensors(real).items():
        mine = together[f"0.{n}"]
        assert mine.shape == t.shape
        if t.is_floating_point() and t.numel() > 40:
            assert abs(float(mine.std()) - float(t.std())) < 0.4 * float(t.std()) + 1e-6, n
    differing = [n for n in tensors(real) if not torch.equal(together[f"0.{n}"], together[f"1.{n}"])]
    assert bool(differing) == (name not in ("batch norm", "group norm", "layer norm", "prelu"))


@pytest.mark.parametrize("name", FILLS)
def test_initialisers_of_torch(name: str) -> None:
    def factory() -> nn.Module:
        module = nn.Linear(24, 16)
        FILLS[name](module.weight)
        return module

    module, tape = taped(factory)
    weight = tape.realise(module.weight.detach())
    reference = factory().weight.detach()
    assert weight.device.type == "cpu"
    assert abs(float(weight.std()) - float(reference.std())) < 0.2 * float(reference.std()) + 1e-6
    if name == "orthogonal":
        assert torch.allclose(weight @ weight.T, torch.eye(16), atol=1e-5)
    if name in ("constant", "eye"):
        assert torch.equal(weight, reference)


def test_what_people_do_in_constructors() -> None:
    module, tape = taped(ByHand)
    real = ByHand()
    made = {n: tape.realise(t.detach()) for n, t in tensors(module).items()}
    assert made.keys() == tensors(real).keys()
    assert module.rate == pytest.approx(real.rate)
    assert torch.allclose(made["table"], real.table)
    assert float(made["layers.0.weight"].abs().max()) == pytest.approx(0.4)
    assert torch.equal(made["layers.0.bias"][1:3], torch.full((2,), 7.0))
    assert torch.equal(made["layers.2.weight"], real.layers[2].weight.detach())
    assert float(made["layers.1.weight"].std()) < 0.03
    assert module.tied.weight is module.layers[0].weight
    assert sorted(tape.realise(module.order).tolist()) == list(range(6))
    assert float(tape.realise(module.plain[0])[0]) == pytest.approx(float(real.table.max()))
    other, other_tape = taped(ByHand, seed=2)
    assert torch.equal(other_tape.realise(other.fixed.detach()), made["fixed"]), "the user's own generator"
    assert not torch.equal(other_tape.realise(other.layers[1].weight.detach()), made["layers.1.weight"])


def test_cast_keeps_ties_and_attributes() -> None:
    tape = Tape(0)
    with tape.recording():
        module = ByHand()
        cast(module, torch.float64)
    assert module.tied.weight is module.layers[0].weight
    assert module.fixed.no_decay
    assert all(t.dtype == torch.float64 for t in tensors(module).values())
    assert tape.realise(module.layers[0].weight.detach()).dtype == torch.float64


class Big(nn.Module):
    """Two billion parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10_000, 10_000) for _ in range(20))
        self.first = nn.Linear(4, 10_000)
        self.last = nn.Linear(10_000, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.last(x)


def peak_bytes_of_one_stage() -> int:
    """Trace a model of 8 GB and build its last layer; return the process's peak memory."""
    traced = trace_model(ModelConfig(factory="test_deferred:Big"), torch.zeros(2, 4))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stage = build_stage(traced, ["last"])
    assert [*stage.state_dict()] == ["last.weight", "last.bias"]
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def test_a_stage_of_a_model_that_does_not_fit() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests/model'); import test_deferred as t; "
        "print(t.peak_bytes_of_one_stage())"
    )
    root = __file__.rsplit("/tests/", 1)[0]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100e6


def test_whole_model_and_stages_have_the_same_weights() -> None:
    traced = trace_model(
        ModelConfig(factory="pdmpi.model.zoo.digits:digits_net"), torch.zeros(2, 1, 8, 8), seed=5
    )
    whole = build_model(traced).state_dict()
    names = [layer.name for layer in traced.graph.layers]
    for order in (names, names[::-1]):
        found: dict[str, torch.Tensor] = {}
        for name in order:
            found.update(build_stage(traced, [name], last=False).state_dict())
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[n], whole[n]) for n in whole)
