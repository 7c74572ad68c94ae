"""A decoder in the style of GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT2", "gpt2"]


class CausalAttention(nn.Module):
    """Multi-head attention to the positions before.

    Parameters
    ----------
    width
        Of the vectors; a multiple of ``heads``.
    heads
        Number of heads.
    dropout
        Of attention weights and of the result.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return shape (batch, time, width)."""
        rows, length, width = x.shape
        shape = (rows, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).split(width, 2))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        result: Tensor = self.drop(self.out(y.transpose(1, 2).reshape(rows, length, width)))
        return result


class Block(nn.Module):
    """Attention and a two-layer network, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return shape (batch, time, width)."""
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class GPT2(nn.Module):
    """Embeddings, blocks, and a head tied to the token embedding.

    Parameters
    ----------
    vocabulary, length
        Number of tokens, and of positions.
    width, depth, heads
        Of the blocks.
    dropout
        Everywhere.
    """

    def __init__(
        self, vocabulary: int, length: int, width: int, depth: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                deep = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if deep else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores for the next token, shape (batch, time, vocabulary)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.token(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x))
        return result


def gpt2(
    vocabulary: int = 50257,
    length: int = 1024,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
    dropout: float = 0.1,
) -> GPT2:
    """Return the decoder; 124,439,808 parameters by default."""
    return GPT2(vocabulary, length, width, depth, heads, dropout)
