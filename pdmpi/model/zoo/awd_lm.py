"""AWD LM (Merity et al. 2018): LSTM layers with dropped weights, embeddings tied to the decoder."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

__all__ = ["AWDLM", "awd_lm"]


class WeightDropLSTM(nn.Module):
    """An LSTM layer whose hidden-to-hidden weights are dropped, once a minibatch (section 2).

    Parameters
    ----------
    width, hidden
        Sizes of the input and of the output.
    dropout
        Fraction of the weights.
    """

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, shape (batch, time, hidden)."""
        weight = self.lstm.get_parameter("weight_hh_l0")
        dropped = F.dropout(weight, self.dropout, self.training)
        result: Tensor = functional_call(self.lstm, {"weight_hh_l0": dropped}, (x,))[0]
        return result


class LockedDropout(nn.Module):
    """One mask for all time steps (section 4.2)."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Drop features of ``x``, shape (batch, time, features)."""
        mask = F.dropout(torch.ones_like(x[:, :1]), self.dropout, self.training)
        return x * mask


class EmbeddingDropout(nn.Module):
    """An embedding with whole words dropped (section 4.3)."""

    def __init__(self, vocabulary: int, width: int, dropout: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width).uniform_(-0.1, 0.1))
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors of tokens, shape (batch, time, width)."""
        keep = F.dropout(torch.ones_like(self.weight[:, :1]), self.dropout, self.training)
        return F.embedding(tokens, self.weight * keep)


class AWDLM(nn.Module):
    """The language model.

    Parameters
    ----------
    vocabulary
        Number of tokens (10,000 in Penn Treebank, 33,278 in WikiText-2).
    width, hidden
        Of the embeddings, and of the layers between them.
    layers
        LSTM layers.
    dropouts
        Of embeddings, input, between layers, output, and hidden-to-hidden weights.
    """

    def __init__(
        self,
        vocabulary: int = 10000,
        width: int = 400,
        hidden: int = 1150,
        layers: int = 3,
        dropouts: tuple[float, float, float, float, float] = (0.1, 0.4, 0.25, 0.4, 0.5),
    ) -> None:
        super().__init__()
        embedding, first, between, last, weights = dropouts
        sizes = [width, *[hidden] * (layers - 1), width]
        self.embedding = EmbeddingDropout(vocabulary, width, embedding)
        self.rnns = nn.ModuleList(WeightDropLSTM(a, b, weights) for a, b in pairwise(sizes))
        self.drops = nn.ModuleList(LockedDropout(p) for p in [first, *[between] * (layers - 1), last])
        self.decoder = nn.Linear(width, vocabulary)
        self.decoder.weight = self.embedding.weight
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores for the next token, shape (batch, time, vocabulary)."""
        x = self.drops[0](self.embedding(tokens))
        for rnn, drop in zip(self.rnns, list(self.drops)[1:], strict=True):
            x = drop(rnn(x))
        result: Tensor = self.decoder(x)
        return result


def awd_lm(
    vocabulary: int = 10000, width: int = 400, hidden: int = 1150, layers: int = 3, dropout: float = 1.0
) -> AWDLM:
    """Return the model; 24,221,600 parameters by default.  ``dropout`` scales all of the paper's."""
    embedding, first, between, last, weights = (dropout * p for p in (0.1, 0.4, 0.25, 0.4, 0.5))
    return AWDLM(vocabulary, width, hidden, layers, (embedding, first, between, last, weights))
