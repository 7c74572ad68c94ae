"""GNMT (Wu et al. 2016) as PipeDream's authors trained it: 4+4 or 8+8 LSTM layers.

Attention is Bahdanau's, normalised, between the decoder's first layer and the encoder's
output; every later decoder layer reads the context beside its input.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["GNMT", "gnmt8", "gnmt16"]


class _Last(nn.Module):
    """An LSTM layer that returns its outputs only, shape (batch, time, hidden)."""

    def __init__(self, width: int, hidden: int, bidirectional: bool = False) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, hidden, batch_first=True, bidirectional=bidirectional)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.lstm(x)[0]
        return result


class _Attention(nn.Module):
    """Normalised additive attention (Bahdanau et al. 2015; Salimans and Kingma 2016)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.direction = nn.Parameter(torch.empty(hidden).uniform_(-0.1, 0.1))
        self.scale = nn.Parameter(torch.tensor([hidden**-0.5]))
        self.bias = nn.Parameter(torch.zeros(hidden))

    def forward(self, query: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        """Return the context of each query, shape (batch, queries, hidden)."""
        q, k = self.query(query), self.key(memory)
        energy = torch.tanh(q.unsqueeze(2) + k.unsqueeze(1) + self.bias)
        scores = energy @ (self.direction / self.direction.norm() * self.scale)
        scores = scores.masked_fill(padding.unsqueeze(1), float("-inf"))
        result: Tensor = scores.softmax(-1) @ memory
        return result


class GNMT(nn.Module):
    """Encoder, attention, decoder and classifier.

    Parameters
    ----------
    layers
        LSTM layers of the encoder (its first is bidirectional) and of the decoder, each.
    vocabulary
        Number of tokens; token 0 is padding.
    hidden
        Width of embeddings and layers.
    dropout
        Before every layer.
    share_embedding
        Whether source and target have one embedding.
    """

    def __init__(
        self,
        layers: int,
        vocabulary: int = 32320,
        hidden: int = 1024,
        dropout: float = 0.2,
        share_embedding: bool = False,
    ) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(vocabulary, hidden, padding_idx=0)
        self.target_embedding = (
            self.source_embedding if share_embedding else nn.Embedding(vocabulary, hidden, padding_idx=0)
        )
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.ModuleList(
            [_Last(hidden, hidden, bidirectional=True), _Last(2 * hidden, hidden)]
            + [_Last(hidden, hidden) for _ in range(layers - 2)]
        )
        self.first_decoder = _Last(hidden, hidden)
        self.attention = _Attention(hidden)
        self.decoder = nn.ModuleList(_Last(2 * hidden, hidden) for _ in range(layers - 1))
        self.classifier = nn.Linear(hidden, vocabulary)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.uniform_(parameter, -0.1, 0.1)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return scores for the next token.

        Parameters
        ----------
        source
            Tokens, shape (batch, source length), 0 where padded.
        target
            Tokens before the ones to predict, shape (batch, target length).

        Returns
        -------
        Tensor
            Shape (batch, target length, vocabulary).
        """
        x = self.source_embedding(source)
        for i, layer in enumerate(self.encoder):
            y = layer(self.dropout(x))
            x = y + x if i > 1 else y
        memory = x
        y = self.first_decoder(self.target_embedding(target))
        context = self.attention(y, memory, source == 0)
        x = y
        for i, layer in enumerate(self.decoder):
            y = layer(torch.cat([self.dropout(x), context], 2))
            x = y + x if i > 0 else y
        result: Tensor = self.classifier(x)
        return result


def gnmt8(
    vocabulary: int = 32320, hidden: int = 1024, dropout: float = 0.2, share_embedding: bool = False
) -> GNMT:
    """Return GNMT-8: 193,766,977 parameters by default, 160,671,297 with one embedding."""
    return GNMT(4, vocabulary, hidden, dropout, share_embedding)


def gnmt16(
    vocabulary: int = 32320, hidden: int = 1024, dropout: float = 0.2, share_embedding: bool = False
) -> GNMT:
    """Return GNMT-16: 277,718,593 parameters by default."""
    return GNMT(8, vocabulary, hidden, dropout, share_embedding)
