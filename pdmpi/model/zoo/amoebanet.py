"""AmoebaNet-D (Real et al. 2019), as GPipe (Huang et al. 2019) scales it by layers and filters.

The cells' outputs are concatenated as in the authors' TensorFlow code (0, 3, 4, 6 in a
normal cell), which gives the sizes of GPipe's table 1; the paper's text says otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["amoebanet_d"]


class _Pair(NamedTuple):
    """Two operations, each on an earlier state, that are added to a new state."""

    left: tuple[int, str]
    right: tuple[int, str]


_NORMAL = (
    _Pair((1, "conv1"), (1, "pool3")),
    _Pair((1, "none"), (0, "conv7")),
    _Pair((0, "conv1"), (0, "conv7")),
    _Pair((2, "pool3"), (2, "none")),
    _Pair((1, "pool3"), (5, "conv1")),
)
_REDUCTION = (
    _Pair((0, "max2"), (0, "pool3")),
    _Pair((2, "none"), (1, "conv3")),
    _Pair((2, "conv7"), (2, "pool3")),
    _Pair((3, "none"), (1, "max2")),
    _Pair((2, "pool3"), (3, "conv1")),
)


def _conv(
    channels: int, out: int, kernel: int | tuple[int, int] = 1, stride: int | tuple[int, int] = 1
) -> list[nn.Module]:
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (height // 2, width // 2)
    return [
        nn.ReLU(),
        nn.Conv2d(channels, out, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(out),
    ]


class _Halve(nn.Module):
    """Half the height and width by two strided 1x1 convolutions, one of them shifted by a pixel."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(channels, out // 2, 1, stride=2, bias=False)
        self.shift = nn.ZeroPad2d((-1, 1, -1, 1))
        self.odd = nn.Conv2d(channels, out // 2, 1, stride=2, bias=False)
        self.bn = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        result: Tensor = self.bn(torch.cat([self.even(x), self.odd(self.shift(x))], 1))
        return result


def _operation(name: str, c: int, stride: int) -> nn.Module:
    if name == "none":
        return nn.Identity() if stride == 1 else _Halve(c, c)
    if name == "pool3":
        return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)
    if name == "max2":
        return nn.MaxPool2d(2, stride)
    if name == "conv1":
        return nn.Sequential(*_conv(c, c, stride=stride))
    q = c // 4
    if name == "conv3":
        return nn.Sequential(*_conv(c, q), *_conv(q, q, 3, stride), *_conv(q, c))
    wide = _conv(q, q, (1, 7), (1, stride))
    return nn.Sequential(*_conv(c, q), *wide, *_conv(q, q, (7, 1), (stride, 1)), *_conv(q, c))


class _Cell(nn.Module):
    """Five pairs of operations on the outputs of the two cells before (figure 2)."""

    def __init__(self, channels: tuple[int, int], width: int, reduction: bool, after_reduction: bool) -> None:
        super().__init__()
        before, last = channels
        self.from_last = nn.Sequential(*_conv(last, width))
        self.from_before: nn.Module = nn.Identity()
        if after_reduction:
            self.from_before = _Halve(before, width)
        elif before != width:
            self.from_before = nn.Sequential(*_conv(before, width))
        self.pairs = _REDUCTION if reduction else _NORMAL
        self.joined = (4, 5, 6) if reduction else (0, 3, 4, 6)
        self.operations = nn.ModuleList()
        for pair in self.pairs:
            for state, name in pair:
                stride = 2 if reduction and state < 2 else 1
                self.operations.append(_operation(name, width, stride))
        self.out_channels = len(self.joined) * width

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        states = [self.from_last(last), self.from_before(before)]
        for i, pair in enumerate(self.pairs):
            left = self.operations[2 * i](states[pair.left[0]])
            right = self.operations[2 * i + 1](states[pair.right[0]])
            states.append(left + right)
        return torch.cat([states[i] for i in self.joined], 1)


class _AmoebaNet(nn.Module):
    def __init__(self, layers: int, filters: int, classes: int) -> None:
        super().__init__()
        width = filters // 4
        self.stem = nn.Sequential(*_conv(3, width, 3, 2))
        self.cells = nn.ModuleList()
        channels, after_reduction = (width, width), False
        normal = layers // 3 * [False]
        for reduction in [True, True, *normal, True, *normal, True, *normal]:
            width *= 2 if reduction else 1
            cell = _Cell(channels, width, reduction, after_reduction)
            self.cells.append(cell)
            channels, after_reduction = (channels[1], cell.out_channels), reduction
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels[1], classes)

    def forward(self, x: Tensor) -> Tensor:
        last = before = self.stem(x)
        for cell in self.cells:
            last, before = cell(last, before), last
        result: Tensor = self.fc(torch.flatten(self.pool(last), 1))
        return result


def amoebanet_d(layers: int = 18, filters: int = 256, classes: int = 1000) -> nn.Module:
    """Return AmoebaNet-D (layers, filters) for images of shape (batch, 3, 224, 224).

    Parameters
    ----------
    layers
        Normal cells, a multiple of three.
    filters
        Filters of the first cells; a multiple of 16.
    classes
        Number of outputs.

    Raises
    ------
    ValueError
        For numbers of layers or filters that the cells cannot have.
    """
    if layers % 3 or filters % 16:
        raise ValueError(f"layers = {layers} must be a multiple of 3, filters = {filters} one of 16")
    return _AmoebaNet(layers, filters, classes)
