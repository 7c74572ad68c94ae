"""Handwritten digits: scikit-learn's 1,797 real images, and a small residual net for them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

__all__ = ["ResidualBlock", "digits", "digits_net"]

_TEST_EVERY = 5
"""Every fifth image is a test image."""


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch normalisation beside a shortcut (He et al. 2016, figure 2).

    Parameters
    ----------
    channels_in, channels_out
        Channels of the input, shape (batch, channels_in, height, width), and of the output.
    stride
        Of the first convolution.  The shortcut is a 1x1 convolution when the shapes differ.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return shape (batch, channels_out, height / stride, width / stride)."""
        inner = self.relu1(self.norm1(self.conv1(x)))
        result: Tensor = self.relu2(self.norm2(self.conv2(inner)) + self.shortcut(x))
        return result


def digits_net(width: int = 32, blocks: int = 3, hidden: int = 256, classes: int = 10) -> nn.Sequential:
    """Return a residual net for 8x8 grey images.

    Parameters
    ----------
    width
        Channels at full resolution; twice as many at half resolution.
    blocks
        Residual blocks at each of the two resolutions.
    hidden
        Width of the fully connected layer.
    classes
        Number of outputs.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    layers += [ResidualBlock(width, width) for _ in range(blocks)]
    layers.append(ResidualBlock(width, 2 * width, stride=2))
    layers += [ResidualBlock(2 * width, 2 * width) for _ in range(blocks - 1)]
    layers += [
        nn.Flatten(),
        nn.Linear(2 * width * 16, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    ]
    return nn.Sequential(*layers)


def digits(split: Literal["train", "test"] = "train") -> TensorDataset:
    """Return scikit-learn's handwritten digits, 1,437 to train on and 360 to test.

    Images are float32 of shape (1, 8, 8) in 0..1, labels int64.  The split is fixed: every
    fifth image is a test image.
    """
    found = find_spec("sklearn")  # its file is read without importing it, which takes seconds on every rank
    if found is None or found.origin is None:
        raise ModuleNotFoundError("scikit-learn brings the digits: pip install scikit-learn", name="sklearn")
    rows = np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    images = torch.from_numpy(rows[:, :-1]).to(torch.float32).div_(16.0).reshape(-1, 1, 8, 8)
    labels = torch.from_numpy(rows[:, -1]).to(torch.int64)
    test = torch.arange(len(labels)) % _TEST_EVERY == _TEST_EVERY - 1
    chosen = test if split == "test" else ~test
    return TensorDataset(images[chosen], labels[chosen])
