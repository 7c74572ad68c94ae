"""VGG-16 (Simonyan and Zisserman 2015, configuration D)."""

from __future__ import annotations

from torch import nn

__all__ = ["vgg16"]

_BLOCKS = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
"""(channels in units of the width, convolutions) of each block."""


def vgg16(
    classes: int = 1000, width: int = 64, hidden: int = 4096, dropout: float = 0.5, pooled: int = 7
) -> nn.Sequential:
    """Return the net for images of shape (batch, 3, 224, 224); 138,357,544 parameters by default.

    Parameters
    ----------
    classes
        Number of outputs.
    width
        Channels of the first block; later ones have up to eight times as many.
    hidden
        Width of the two fully connected layers.
    dropout
        After each of them.
    pooled
        Height and width of what the convolutions hand on, whatever the image's size.
    """
    layers: list[nn.Module] = []
    channels = 3
    for factor, convolutions in _BLOCKS:
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, factor * width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = factor * width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(pooled), nn.Flatten()]
    size = channels * pooled * pooled
    for _ in range(2):
        layers += [nn.Linear(size, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout)]
        size = hidden
    layers.append(nn.Linear(size, classes))
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(*layers)
