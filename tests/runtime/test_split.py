"""The split backward equals the whole one, layer by layer, bitwise where one kernel computes both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pdmpi.runtime.split import SplitBackward


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


class Shared(nn.Module):
    """One layer used twice in series: the parts cannot be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


MODELS = {
    "convolution": (lambda: nn.Sequential(Residual(), nn.Conv2d(4, 4, 3), Residual()), (3, 4, 8, 8)),
    "attention": (lambda: nn.Sequential(Attention(), nn.Linear(16, 16), nn.GELU(), Attention()), (3, 5, 16)),
    "lstm": (lambda: nn.Sequential(Recurrent(), nn.Linear(16, 16)), (3, 5, 16)),
    "shared": (Shared, (3, 16)),
}


@pytest.mark.parametrize("name", MODELS)
def test_parts_add_up_to_the_whole(name: str) -> None:
    torch.manual_seed(0)
    factory, shape = MODELS[name]
    module = factory().double()
    leaf = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    output = module(leaf)
    gradient = torch.randn_like(output)
    torch.autograd.backward([output], [gradient])
    expected = [p.grad.clone() for p in module.parameters()]
    expected_leaf = leaf.grad.clone()

    module.zero_grad()
    leaf.grad = None
    output = module(leaf)
    split = SplitBackward([output], [gradient], [leaf])
    split.input_part()
    torch.testing.assert_close(leaf.grad, expected_leaf, rtol=1e-12, atol=1e-12)
    if name not in ("shared", "lstm"):  # a recurrent layer reads its weights at every step
        done = [p for p in module.parameters() if p.grad is not None]
        assert not done, "the first part computes no parameter gradient"
    split.weight_part()
    for parameter, reference in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, reference, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(leaf.grad, expected_leaf, rtol=1e-12, atol=1e-12)


def test_first_stage_leaves_everything_to_the_second_part() -> None:
    module = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4))
    output = module(torch.tensor([[1, 2], [3, 4]]))
    split = SplitBackward([output], [torch.ones_like(output)], [])
    split.input_part()
    assert all(p.grad is None for p in module.parameters())
    split.weight_part()
    assert all(p.grad is not None for p in module.parameters())
