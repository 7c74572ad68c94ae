"""Small models with layers of every kind, and data for them, named by the tests' configurations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pdmpi.model.zoo.digits import digits


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.gate = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.gate * self.attention(y, y, y, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def conv(channels: int = 6, drop: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
        Residual(channels), Residual(channels), nn.Dropout2d(0.2) if drop else nn.Tanh(), Residual(channels),
        nn.Flatten(), nn.Linear(channels * 64, 10),
    )  # fmt: skip


def sequence(width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(17, width), Block(width), nn.Dropout(0.1), Recurrent(width),
        nn.LayerNorm(width), Block(width), nn.Dropout(0.1), nn.Flatten(),
        nn.Linear(8 * width, 10),
    )  # fmt: skip


def conv_without_draws() -> nn.Module:
    return conv(drop=False)


def images(split: str = "train", samples: int = 48) -> TensorDataset:
    pixels, target = _digits(split, samples)
    return TensorDataset(pixels, target)


def tokens(split: str = "train", samples: int = 48) -> TensorDataset:
    pixels, target = _digits(split, samples)
    return TensorDataset((16 * pixels[:, 0, :, 3]).long(), target)


def _digits(split: str, samples: int) -> tuple[Tensor, Tensor]:
    pixels, target = digits("train").tensors
    chosen = slice(0, samples) if split == "train" else slice(samples, samples + 13)
    return pixels[chosen].double(), target[chosen]


class Unused(nn.Module):
    """Holds a parameter that no forward reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x))


class FixedStatistics(nn.Module):
    """A block whose BatchNorm stays in evaluation, as fine-tuning has it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


def unused() -> nn.Module:
    return nn.Sequential(nn.Flatten(), Unused(64), nn.Dropout(0.1), Unused(64), nn.Linear(64, 10))


def frozen(everything: bool = False) -> nn.Module:
    model = conv()
    for name, parameter in model.named_parameters():
        if everything or name.startswith(("0.", "1.", "3.")):
            parameter.requires_grad_(False)
    return model


def fixed_statistics() -> nn.Module:
    return nn.Sequential(FixedStatistics(), nn.Tanh(), nn.Flatten(), nn.Linear(256, 10))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 32, bias=False)
        self.inner = nn.Linear(32, 32)
        self.back = nn.Linear(32, 64, bias=False)
        self.back.weight = nn.Parameter(torch.zeros(64, 32))
        self.again = nn.Linear(64, 32, bias=False)
        self.again.weight = self.embed.weight
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.inner(self.embed(x.flatten(1))))
        return self.head(self.again(self.back(y)))


def tied() -> nn.Module:
    return Tied()


class _Overflowing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, bad: bool) -> Tensor:
        ctx.bad = bad
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gain = ctx.saved_tensors
        own = (gradient * x).sum()
        return gradient * gain, torch.full_like(own, torch.inf) if ctx.bad else own, None


class Overflowing(nn.Module):
    """The gradient of its own parameter, and no other, overflows in one microbatch."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.bad, self.seen = bad, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.seen += 1
        return _Overflowing.apply(x, self.gain, self.seen == self.bad)


def overflows_first() -> nn.Module:
    return nn.Sequential(Overflowing(6), *conv())


def overflows_last() -> nn.Module:
    return nn.Sequential(*conv(), Overflowing(6))


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Square(nn.Module):
    """A custom autograd function."""

    def forward(self, x: Tensor) -> Tensor:
        return _Square.apply(x)


class Experts(nn.Module):
    """A mixture of experts, and the term that keeps them equally busy."""

    def __init__(self, width: int, count: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = torch.softmax(self.gate(x), dim=1)
        made = torch.stack([expert(x) for expert in self.experts], dim=2)
        return (made * shares[:, None, :]).sum(dim=2), (shares.mean(dim=0) ** 2).sum()


class SeveralTerms(nn.Module):
    """Terms of the loss are made early: a balance term, and a side head's scores."""

    def __init__(self, always: bool = True) -> None:
        super().__init__()
        self.first, self.square = Experts(64), Square()
        self.second = nn.Linear(64, 32)
        self.side, self.head = nn.Linear(64, 10), nn.Linear(32, 10)
        self.always = always

    def forward(self, x: Tensor) -> dict[str, Tensor | None] | Tensor:
        y, balance = self.first(x.flatten(1))
        y = torch.tanh(self.square(y) + y)
        side = self.side(y)
        scores = self.head(torch.relu(self.second(y)))
        if self.training or self.always:
            return {"scores": scores, "side": side, "balance": balance}
        return scores


def several_terms(always: bool = True) -> nn.Module:
    return SeveralTerms(always)


def terms() -> Any:
    def loss(output: Any, target: Tensor) -> Tensor:
        if isinstance(output, Tensor):
            return nn.functional.cross_entropy(output, target)
        own = nn.functional.cross_entropy(output["scores"], target)
        side = nn.functional.cross_entropy(output["side"], target)
        return own + 0.4 * side + 0.1 * output["balance"]

    return loss


def spectral() -> nn.Module:
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(nn.Flatten(), norm(nn.Linear(64, 32)), nn.Tanh(), norm(nn.Linear(32, 10)))


class Ragged(TensorDataset):
    """Batches lose their columns after a while."""

    fetched = 0

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        self.fetched += 1
        x, y = (tensor[indices] for tensor in self.tensors)
        return (x if self.fetched < 4 else x[:, :, :1, :1]), y


def ragged(split: str = "train") -> TensorDataset:
    return Ragged(*images(split).tensors)
