"""An encoder in the style of BERT (Devlin et al. 2019), with its masked language model's head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["BERT", "bert"]


class SelfAttention(nn.Module):
    """Multi-head attention to the positions that are not padding."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        """Return shape (batch, time, width); ``keep`` is boolean, shape (batch, 1, 1, time)."""
        rows, length, width = x.shape
        shape = (rows, length, self.heads, width // self.heads)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.query, self.key, self.value))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep, dropout_p=dropout)
        result: Tensor = self.out(y.transpose(1, 2).reshape(rows, length, width))
        return result


class Layer(nn.Module):
    """Attention and a two-layer network, each followed by a norm over the shortcut's sum."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads, dropout)
        self.norm1 = nn.LayerNorm(width, eps=1e-12)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-12)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        """Return shape (batch, time, width)."""
        x = self.norm1(x + self.drop(self.attention(x, keep)))
        result: Tensor = self.norm2(x + self.drop(self.outer(F.gelu(self.inner(x)))))
        return result


class BERT(nn.Module):
    """Embeddings, layers, and a head tied to the token embedding.

    Parameters
    ----------
    vocabulary, length
        Number of tokens (0 is padding), and of positions.
    width, depth, heads
        Of the layers.
    dropout
        Everywhere.
    """

    def __init__(
        self, vocabulary: int, length: int, width: int, depth: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width, padding_idx=0)
        self.position = nn.Embedding(length, width)
        self.segment = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(depth))
        self.transform = nn.Linear(width, width)
        self.transform_norm = nn.LayerNorm(width, eps=1e-12)
        self.head = nn.Linear(width, vocabulary)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.token.weight
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        """Return scores for every token, shape (batch, time, vocabulary)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if segments is None:
            segments = torch.zeros_like(tokens)
        x = self.token(tokens) + self.position(positions) + self.segment(segments)
        x = self.drop(self.norm(x))
        keep = (tokens != 0)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, keep)
        result: Tensor = self.head(self.transform_norm(F.gelu(self.transform(x))))
        return result


def bert(
    vocabulary: int = 30522,
    length: int = 512,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
    dropout: float = 0.1,
) -> BERT:
    """Return the encoder with its head; 109,514,298 parameters by default."""
    return BERT(vocabulary, length, width, depth, heads, dropout)
