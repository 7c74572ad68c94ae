"""A transformer of equal blocks, with data: the same for every contestant."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils.data import TensorDataset

CLASSES = 10


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.mix(self.first(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(rows, length, width)
        x = x + self.project(mixed)
        return x + self.narrow(gelu(self.widen(self.second(x))))


class Head(nn.Module):
    """Mean over positions, then classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.classify = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(x.mean(dim=1))


def block_net(blocks: int, width: int, heads: int) -> nn.Sequential:
    return nn.Sequential(*(Block(width, heads) for _ in range(blocks)), Head(width))


def block_data(split: str, samples: int, length: int, width: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, length, width, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (samples,), generator=generator))
