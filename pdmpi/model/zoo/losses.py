"""Losses of the zoo's models."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["AuxiliaryCrossEntropy", "TokenCrossEntropy"]


class TokenCrossEntropy(nn.Module):
    """Cross entropy of scores of shape (batch, time, vocabulary), the mean over tokens that count.

    Parameters
    ----------
    ignored
        Target that does not count (padding).
    label_smoothing
        Mass that is spread over all tokens.
    """

    def __init__(self, ignored: int = -100, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.ignored = ignored
        self.label_smoothing = label_smoothing

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        """Return the loss; ``target`` has shape (batch, time)."""
        return F.cross_entropy(
            scores.flatten(0, 1), target.flatten(),
            ignore_index=self.ignored, label_smoothing=self.label_smoothing,
        )  # fmt: skip


class AuxiliaryCrossEntropy(nn.Module):
    """Cross entropy of a pair (scores, auxiliary scores), or of scores alone.

    Parameters
    ----------
    weight
        Of the auxiliary term.
    """

    def __init__(self, weight: float = 0.4) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, output: Tensor | tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        """Return the loss; ``target`` has shape (batch,)."""
        if isinstance(output, Tensor):
            return F.cross_entropy(output, target)
        scores, auxiliary = output
        return F.cross_entropy(scores, target) + self.weight * F.cross_entropy(auxiliary, target)
