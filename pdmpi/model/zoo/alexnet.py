"""AlexNet, the one-tower version (Krizhevsky 2014, "One weird trick")."""

from __future__ import annotations

from torch import nn

__all__ = ["alexnet"]


def alexnet(classes: int = 1000, width: int = 64, hidden: int = 4096, dropout: float = 0.5) -> nn.Sequential:
    """Return the net for images of shape (batch, 3, 224, 224); 61,100,840 parameters by default.

    Parameters
    ----------
    classes
        Number of outputs.
    width
        Channels of the first convolution; the others follow it (3, 6, 4 and 4 times as many).
    hidden
        Width of the two fully connected layers.
    dropout
        Before each of them.
    """
    features = nn.Sequential(
        nn.Conv2d(3, width, 11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(width, 3 * width, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(3 * width, 6 * width, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(6 * width, 4 * width, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(4 * width, 4 * width, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
    )
    classifier = nn.Sequential(
        nn.Dropout(dropout),
        nn.Linear(4 * width * 36, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, classes),
    )
    return nn.Sequential(features, classifier)
