"""A byte-level language model with layers whose backward reads their weights, and real text for it."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from pdmpi.model.zoo.data import text

BYTES = 256


class Recurrent(nn.Module):
    """An LSTM beside a shortcut, behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(self.norm(x))[0]


def byte_net(width: int, layers: int) -> nn.Sequential:
    """Return recurrent layers between an embedding and a classifier of the next byte."""
    body = [Recurrent(width) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(BYTES, width), *body, nn.LayerNorm(width), nn.Linear(width, BYTES))


def byte_text(split: Literal["train", "test"], length: int, count: int) -> Dataset[tuple[Tensor, Tensor]]:
    """Return the first ``count`` pieces of Python's own manual (a quarter as many to test)."""
    found = text(split, length)
    return Subset(found, range(count if split == "train" else count // 4))
