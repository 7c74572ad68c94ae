"""ResNet-50 (He et al. 2016), with the stride in the 3x3 convolution of a block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["Bottleneck", "ResNet", "resnet50"]

_EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut (section 4.1, figure 5).

    Parameters
    ----------
    channels
        Of the input.
    planes
        Of the 3x3 convolution; the output has four times as many.
    stride
        Of the 3x3 convolution and of the shortcut.
    """

    def __init__(self, channels: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, _EXPANSION * planes, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(_EXPANSION * planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or channels != _EXPANSION * planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, _EXPANSION * planes, 1, stride, bias=False),
                nn.BatchNorm2d(_EXPANSION * planes),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return shape (batch, 4 planes, height / stride, width / stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += shortcut
        result: Tensor = self.relu(y)
        return result


class ResNet(nn.Module):
    """A stem, four groups of `Bottleneck` blocks, and a classifier.

    Parameters
    ----------
    blocks
        Blocks of each group.
    classes
        Number of outputs.
    width
        Channels of the stem.
    """

    def __init__(self, blocks: Sequence[int], classes: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        groups, channels = [], width
        for i, count in enumerate(blocks):
            planes = width * 2**i
            group = []
            for j in range(count):
                group.append(Bottleneck(channels, planes, 2 if i and not j else 1))
                channels = _EXPANSION * planes
            groups.append(nn.Sequential(*group))
        self.layer1, self.layer2, self.layer3, self.layer4 = groups
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of shape (batch, classes) for images of shape (batch, 3, height, width)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        result: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return result


def resnet50(classes: int = 1000, width: int = 64, blocks: Sequence[int] = (3, 4, 6, 3)) -> ResNet:
    """Return the net; 25,557,032 parameters by default."""
    return ResNet(blocks, classes, width)
