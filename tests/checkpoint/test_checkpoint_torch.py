"""Stages to arrays and back: bitwise, for every kind of layer, dtype and optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pdmpi.checkpoint import Snapshot
from pdmpi.errors import InputError
from pdmpi.runtime.state import array_of, restore, snapshot_of, state_names, tensor_of

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "NAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "centered": True},
    "Adafactor": {"lr": 0.01},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        y = self.bn(self.conv(x)).mean(1)
        return self.head(self.frozen(self.norm(self.lstm(y)[0][:, -1])))


def trainable(module):
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def steps(module, optimizer, n, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        x = torch.randn(5, 1, 8, 8, generator=generator, dtype=next(module.parameters()).dtype)
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bitwise_after_a_restore(name):
    torch.manual_seed(0)
    module = Net()
    optimizer = getattr(torch.optim, name)(module.parameters(), **OPTIMIZERS[name])
    steps(module, optimizer, 3, 1)
    taken = snapshot_of(module, trainable(module), optimizer)
    frozen_in_time = copy.deepcopy(taken)
    steps(module, optimizer, 3, 2)

    torch.manual_seed(99)
    other = Net()
    fresh = getattr(torch.optim, name)(other.parameters(), **OPTIMIZERS[name])
    restore(frozen_in_time, other, trainable(other), fresh)
    steps(other, fresh, 3, 2)
    for key, value in module.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "float8_e4m3fn", "bool", "int64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 5)])
def test_every_dtype_and_shape_comes_back(dtype, shape):
    tensor = torch.randn(shape).to(getattr(torch, dtype))
    back = tensor_of(array_of(tensor))
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert array_of(back).bits.tobytes() == array_of(tensor).bits.tobytes()


def test_masters_of_higher_precision_are_what_is_kept():
    module = nn.Linear(3, 3).to(torch.bfloat16)
    masters = {n: nn.Parameter(p.detach().float() + 1e-4) for n, p in module.named_parameters()}
    taken = snapshot_of(module, masters, torch.optim.SGD(masters.values(), lr=0.1))
    assert taken.parameters["weight"].dtype == "float32"
    other = nn.Linear(3, 3).to(torch.bfloat16)
    others = {n: nn.Parameter(p.detach().float()) for n, p in other.named_parameters()}
    restore(taken, other, others, torch.optim.SGD(others.values(), lr=0.1))
    assert torch.equal(others["weight"], masters["weight"])
    assert torch.equal(other.weight, masters["weight"].to(torch.bfloat16))


def test_every_difference_is_named_and_nothing_changes():
    module, other = Net(), Net().double()
    other.head = nn.Linear(6, 4).double()
    before = copy.deepcopy(other.state_dict())
    taken = snapshot_of(module, trainable(module), None)
    without = {k: v for k, v in taken.parameters.items() if k != "norm.bias"}
    with pytest.raises(InputError, match=r"no 'norm\.bias'") as caught:
        restore(Snapshot(parameters=without, buffers=taken.buffers), other, trainable(other), None)
    assert "is float32(3, 6) in the checkpoint and float64(4, 6) in the model" in str(caught.value)
    assert all(torch.equal(before[k], v) for k, v in other.state_dict().items())


def test_names_are_those_of_the_state_dict():
    assert state_names(Net()) == tuple(Net().state_dict())
    tied = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    tied["b"].weight = tied["a"].weight
    assert {"a.weight", "b.weight"} <= snapshot_of(tied, trainable(tied), None).parameters.keys()


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_state_moves_between_cpu_and_gpu(fused):
    """From the device to the host and back to the device: training there goes on bitwise."""
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3)).cuda()
    other, host = copy.deepcopy(module), copy.deepcopy(module).cpu()
    made = [torch.optim.AdamW(m.parameters(), fused=fused) for m in (module, other)]
    on_host = torch.optim.AdamW(host.parameters())
    x = torch.randn(5, 1, 8, 8, device="cuda")

    def train(m, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()

    train(module, made[0])
    taken = snapshot_of(module, trainable(module), made[0])
    restore(taken, host, trainable(host), on_host)
    again = snapshot_of(host, trainable(host), on_host)
    assert all(a.equals(b) for (_, a), (_, b) in zip(taken.items(), again.items(), strict=True))
    restore(again, other, trainable(other), made[1])
    train(module, made[0])
    train(other, made[1])
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in module.state_dict().items())
