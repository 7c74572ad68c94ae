"""A GPT without shared weights, and images without a disk: the same for every contestant."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pdmpi.model.zoo.gpt2 import Block

VOCABULARY = 32768


class Embed(nn.Module):
    """Tokens and their positions."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position.weight


class Head(nn.Module):
    """Scores of every token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


def gpt(
    depth: int = 24, width: int = 1024, length: int = 1024, heads: int = 16, dropout: float = 0.0
) -> nn.Sequential:
    """Return 369 million parameters by default: 302 in the blocks, 67 around them."""
    blocks = [Block(width, heads, dropout) for _ in range(depth)]
    for block in blocks if not dropout else []:
        block.attention.drop, block.mlp[3] = nn.Identity(), nn.Identity()
    return nn.Sequential(Embed(length, width), *blocks, Head(width))


def words(split: str = "train", samples: int = 64, length: int = 1024) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (samples, length + 1), generator=generator)
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def pictures(split: str = "train", samples: int = 512) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    shown = torch.randn(64, 3, 224, 224, generator=generator)
    labels = torch.randint(1000, (samples,), generator=generator)
    return TensorDataset(shown[torch.arange(samples) % 64], labels)


class Scores(nn.Module):
    """Cross entropy over tokens, or over whole samples."""

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores.flatten(0, -2), target.flatten())
