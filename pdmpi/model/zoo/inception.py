"""Inception-v3 (Szegedy et al. 2016), with its auxiliary classifier."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["InceptionV3", "inception_v3"]


class _Conv(nn.Sequential):
    """Convolution without bias, batch normalisation, ReLU."""

    def __init__(self, channels: int, out: int, kernel: int | tuple[int, int], **options: Any) -> None:
        super().__init__(
            nn.Conv2d(channels, out, kernel, bias=False, **options),
            nn.BatchNorm2d(out, eps=0.001),
            nn.ReLU(inplace=True),
        )


def _row(
    channels: int, *steps: tuple[int, int | tuple[int, int], int | tuple[int, int]], stride: int = 1
) -> nn.Sequential:
    """Return convolutions in a row, each (channels out, kernel, padding); the last with the stride."""
    layers = []
    for i, (out, kernel, padding) in enumerate(steps):
        last = i == len(steps) - 1
        layers.append(_Conv(channels, out, kernel, padding=padding, stride=stride if last else 1))
        channels = out
    return nn.Sequential(*layers)


class _Branches(nn.Module):
    """Branches side by side, concatenated; a pool, if any, comes last."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class _Split(nn.Module):
    """A stem that ends in a 1x3 and a 3x1 convolution side by side."""

    def __init__(self, stem: nn.Module, channels: int, out: int) -> None:
        super().__init__()
        self.stem = stem
        self.wide = _Conv(channels, out, (1, 3), padding=(0, 1))
        self.tall = _Conv(channels, out, (3, 1), padding=(1, 0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return torch.cat([self.wide(x), self.tall(x)], 1)


def _pooled(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), _Conv(channels, out, 1))


class _Auxiliary(nn.Module):
    """The classifier beside the trunk (section 4)."""

    def __init__(self, channels: int, hidden: tuple[int, int], classes: int) -> None:
        super().__init__()
        self.conv0 = _Conv(channels, hidden[0], 1)
        self.conv1 = _Conv(hidden[0], hidden[1], 5)
        self.fc = nn.Linear(hidden[1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(self.conv0(F.avg_pool2d(x, 5, stride=3)))
        result: Tensor = self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
        return result


class InceptionV3(nn.Module):
    """The net for images of shape (batch, 3, 299, 299).

    Parameters
    ----------
    classes
        Number of outputs.
    width
        Every channel count of the paper is divided by ``64 / width``.
    dropout
        Before the classifier.
    """

    def __init__(self, classes: int = 1000, width: int = 64, dropout: float = 0.5) -> None:
        super().__init__()

        def n(channels: int) -> int:
            return channels * width // 64

        self.stem = nn.Sequential(
            _Conv(3, n(32), 3, stride=2),
            _Conv(n(32), n(32), 3),
            _Conv(n(32), n(64), 3, padding=1),
            nn.MaxPool2d(3, stride=2),
            _Conv(n(64), n(80), 1),
            _Conv(n(80), n(192), 3),
            nn.MaxPool2d(3, stride=2),
        )
        self.mixed5 = nn.Sequential(
            *(self._a(n(channels), n(pool), n) for channels, pool in ((192, 32), (256, 64), (288, 64)))
        )
        self.mixed6a = _Branches(
            _row(n(288), (n(384), 3, 0), stride=2),
            _row(n(288), (n(64), 1, 0), (n(96), 3, 1), (n(96), 3, 0), stride=2),
            nn.MaxPool2d(3, stride=2),
        )
        self.mixed6 = nn.Sequential(*(self._c(n(inner), n) for inner in (128, 160, 160, 192)))
        self.auxiliary = _Auxiliary(n(768), (n(128), n(768)), classes)
        self.mixed7a = _Branches(
            _row(n(768), (n(192), 1, 0), (n(320), 3, 0), stride=2),
            _row(
                n(768),
                (n(192), 1, 0),
                (n(192), (1, 7), (0, 3)),
                (n(192), (7, 1), (3, 0)),
                (n(192), 3, 0),
                stride=2,
            ),
            nn.MaxPool2d(3, stride=2),
        )
        self.mixed7 = nn.Sequential(*(self._e(n(channels), n) for channels in (1280, 2048)))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(n(2048), classes)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.trunc_normal_(module.weight, std=0.1, a=-2, b=2)

    @staticmethod
    def _a(channels: int, pool: int, n: Any) -> nn.Module:
        return _Branches(
            _Conv(channels, n(64), 1),
            _row(channels, (n(48), 1, 0), (n(64), 5, 2)),
            _row(channels, (n(64), 1, 0), (n(96), 3, 1), (n(96), 3, 1)),
            _pooled(channels, pool),
        )

    @staticmethod
    def _c(inner: int, n: Any) -> nn.Module:
        wide, tall = ((1, 7), (0, 3)), ((7, 1), (3, 0))
        return _Branches(
            _Conv(n(768), n(192), 1),
            _row(n(768), (inner, 1, 0), (inner, *wide), (n(192), *tall)),
            _row(n(768), (inner, 1, 0), (inner, *tall), (inner, *wide), (inner, *tall), (n(192), *wide)),
            _pooled(n(768), n(192)),
        )

    @staticmethod
    def _e(channels: int, n: Any) -> nn.Module:
        return _Branches(
            _Conv(channels, n(320), 1),
            _Split(_Conv(channels, n(384), 1), n(384), n(384)),
            _Split(_row(channels, (n(448), 1, 0), (n(384), 3, 1)), n(384), n(384)),
            _pooled(channels, n(192)),
        )

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return scores of shape (batch, classes); in training a pair, with the auxiliary ones."""
        x = self.mixed6(self.mixed6a(self.mixed5(self.stem(x))))
        auxiliary = self.auxiliary(x) if self.training else None
        x = self.mixed7(self.mixed7a(x))
        scores = self.fc(torch.flatten(self.dropout(self.avgpool(x)), 1))
        return scores if auxiliary is None else (scores, auxiliary)


def inception_v3(classes: int = 1000, width: int = 64, dropout: float = 0.5) -> InceptionV3:
    """Return the net; 27,161,264 parameters by default, 3,326,696 of them the auxiliary classifier's."""
    return InceptionV3(classes, width, dropout)
