"""Small models with layers of every kind, and data for them, named by the tests' configurations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


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


def conv(channels: int = 6) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
        Residual(channels), Residual(channels), nn.Dropout2d(0.2), Residual(channels),
        nn.Flatten(), nn.Linear(channels * 64, 10),
    )  # fmt: skip


def sequence(width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(17, width), Block(width), nn.Dropout(0.1), Recurrent(width), nn.LayerNorm(width),
        Block(width), nn.Dropout(0.1), nn.Flatten(), nn.Linear(8 * width, 10),
    )  # fmt: skip


def images(split: str = "train", samples: int = 48) -> TensorDataset:
    from sklearn.datasets import load_digits

    found = load_digits()
    chosen = slice(0, samples) if split == "train" else slice(samples, samples + 13)
    pixels = torch.from_numpy(found.images[chosen]).unsqueeze(1) / 16
    return TensorDataset(pixels, torch.from_numpy(found.target[chosen]))


def tokens(split: str = "train", samples: int = 48) -> TensorDataset:
    from sklearn.datasets import load_digits

    found = load_digits()
    chosen = slice(0, samples) if split == "train" else slice(samples, samples + 13)
    rows = torch.from_numpy(found.images[chosen]).long()[:, :, 3]
    return TensorDataset(rows, torch.from_numpy(found.target[chosen]))


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
