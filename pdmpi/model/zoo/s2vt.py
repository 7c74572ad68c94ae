"""S2VT (Venugopalan et al. 2015): video to text by two LSTM layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["S2VT", "s2vt"]


class S2VT(nn.Module):
    """The first layer reads frames, the second its output beside words (section 3, figure 2).

    While frames come in there are no words, and while words go out no frames: zeros stand
    in for them.

    Parameters
    ----------
    vocabulary
        Number of words; 0 is padding.
    features
        Of a frame (4,096: the last hidden layer of VGG-16).
    width
        Of embedded frames and words.
    hidden
        Of the LSTM layers.
    dropout
        Before both layers and the classifier.
    """

    def __init__(
        self,
        vocabulary: int = 12594,
        features: int = 4096,
        width: int = 500,
        hidden: int = 1000,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.frames = nn.Linear(features, width)
        self.words = nn.Embedding(vocabulary, width, padding_idx=0)
        self.first = nn.LSTM(width, hidden, batch_first=True)
        self.second = nn.LSTM(hidden + width, hidden, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(hidden, vocabulary)

    def forward(self, video: Tensor, caption: Tensor) -> Tensor:
        """Return scores for the next word.

        Parameters
        ----------
        video
            Shape (batch, frames, features).
        caption
            Words before the ones to predict, shape (batch, words).

        Returns
        -------
        Tensor
            Shape (batch, words, vocabulary).
        """
        frames = self.frames(self.dropout(video))
        words = self.words(caption)
        no_frames = frames.new_zeros(words.shape)
        no_words = frames.new_zeros(frames.shape)
        seen, _ = self.first(torch.cat([frames, no_frames], 1))
        told = torch.cat([no_words, words], 1)
        out, _ = self.second(self.dropout(torch.cat([seen, told], 2)))
        result: Tensor = self.classifier(self.dropout(out[:, frames.shape[1] :]))
        return result


def s2vt(
    vocabulary: int = 12594,
    features: int = 4096,
    width: int = 500,
    hidden: int = 1000,
    dropout: float = 0.5,
) -> S2VT:
    """Return the model; 36,968,094 parameters by default."""
    return S2VT(vocabulary, features, width, hidden, dropout)
