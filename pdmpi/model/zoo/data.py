"""Data for the zoo: real text that comes with Python, and synthetic images, sentences, videos.

Everything is made on the spot from a seed: the same on every rank, nothing downloaded.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["images", "masked_text", "sentences", "text", "tokens", "videos"]

Split = Literal["train", "test"]


class _Made(Dataset[Any]):
    """A data set whose samples are made one by one, each from its own seed."""

    def __init__(self, count: int, split: Split, make: Any) -> None:
        self._count = count
        self._offset = 0 if split == "train" else 1 << 30
        self._make = make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._make(torch.Generator().manual_seed(self._offset + index))


def images(
    split: Split = "train", count: int = 512, size: int = 224, classes: int = 1000, channels: int = 3
) -> Dataset[Any]:
    """Return noisy waves to classify: the class sets their frequency and direction.

    Images have shape (channels, size, size), labels are int64.
    """
    axis = torch.linspace(0, 1, size)

    def make(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        label = torch.randint(classes, (), generator=generator)
        angle, frequency = 2.4 * label / classes, 2 + label % 7
        wave = torch.sin(
            6.28 * frequency * (axis[:, None] * torch.cos(angle) + axis[None, :] * torch.sin(angle))
        )
        noise = torch.randn(channels, size, size, generator=generator)
        return wave + 0.5 * noise, label

    return _Made(count, split, make)


def text(split: Split = "train", length: int = 128) -> Dataset[Any]:
    """Return Python's own manual as bytes, in pieces of ``length``; every tenth piece is to test.

    Samples are (tokens, the tokens after them), both int64 of shape (length,), below 256.
    """
    pieces = _pieces(split, length + 1)
    return torch.utils.data.TensorDataset(pieces[:, :-1], pieces[:, 1:])


def masked_text(
    split: Split = "train", length: int = 128, fraction: float = 0.15, vocabulary: int = 256
) -> Dataset[Any]:
    """Return the same text with bytes to guess (Devlin et al. 2019, section 3.1).

    Of the chosen bytes 80 % become the mask (token 1), 10 % another byte.  Targets are
    -100 where nothing is to be guessed.
    """
    pieces = _pieces(split, length)
    generator = torch.Generator().manual_seed(len(pieces))
    chosen = torch.rand(pieces.shape, generator=generator) < fraction
    kind = torch.rand(pieces.shape, generator=generator)
    other = torch.randint(2, min(vocabulary, 256), pieces.shape, generator=generator)
    shown = torch.where(chosen & (kind < 0.8), torch.ones_like(pieces), pieces)
    shown = torch.where(chosen & (kind > 0.9), other, shown)
    return torch.utils.data.TensorDataset(shown, pieces.masked_fill(~chosen, -100))


def tokens(
    split: Split = "train", count: int = 4096, length: int = 70, vocabulary: int = 10000
) -> Dataset[Any]:
    """Return made-up text: each token follows from the one before, with noise."""

    def make(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        jumps = torch.randint(1, 4, (length + 1,), generator=generator)
        start = torch.randint(vocabulary, (), generator=generator)
        made = (start + jumps.cumsum(0)) % vocabulary
        return made[:-1], made[1:]

    return _Made(count, split, make)


def sentences(
    split: Split = "train", count: int = 4096, length: int = 50, vocabulary: int = 32320
) -> Dataset[Any]:
    """Return made-up translations: the source backwards, padded with 0; token 1 starts, 2 ends.

    Samples are ((source, target so far), next tokens), int64 of shape (length,).
    """

    def make(generator: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        words = int(torch.randint(length // 2, length, (), generator=generator))
        source = torch.zeros(length, dtype=torch.int64)
        source[:words] = torch.randint(3, vocabulary, (words,), generator=generator)
        target = torch.zeros(length + 1, dtype=torch.int64)
        target[0] = 1
        target[1 : words + 1] = source[:words].flip(0)
        if words < length:
            target[words + 1] = 2
        return (source, target[:-1]), target[1:]

    return _Made(count, split, make)


def videos(
    split: Split = "train",
    count: int = 1024,
    frames: int = 80,
    words: int = 20,
    features: int = 4096,
    vocabulary: int = 12594,
) -> Dataset[Any]:
    """Return made-up videos whose captions count on from a word that the frames show.

    Samples are ((video, caption so far), next words): float32 of shape (frames, features),
    int64 of shape (words,).
    """

    def make(generator: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        start = int(torch.randint(1, vocabulary, (), generator=generator))
        video = 0.1 * torch.randn(frames, features, generator=generator)
        video[:, start % features] += 1.0
        caption = 1 + (start + torch.arange(words + 1)) % (vocabulary - 1)
        return (video, caption[:-1]), caption[1:]

    return _Made(count, split, make)


def _pieces(split: Split, length: int) -> Tensor:
    """Return the manual that ``help()`` reads, cut into rows, shape (pieces, length)."""
    from pydoc_data.topics import topics

    raw = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(torch.int64)
    rows = data[: len(data) // length * length].view(-1, length)
    test = torch.arange(len(rows)) % 10 == 9
    return rows[test if split == "test" else ~test]
