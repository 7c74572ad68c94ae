"""Figures without a display: what all pictures of this room share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pdmpi.errors import InputError

__all__ = ["COLOURS", "figure", "save"]

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")
"""Of stages, in turn."""


def figure(width: float, height: float, heights: Sequence[float] = (1.0,)) -> tuple[Any, list[Any]]:
    """Return a figure of so many inches and its axes, one below the other, of these relative heights."""
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    axes = made.subplots(len(heights), squeeze=False, height_ratios=list(heights))
    return made, list(axes[:, 0])


def save(made: Any, path: Path) -> None:
    """Write a figure in the format of the path's suffix."""
    try:
        made.savefig(path, dpi=150)
    except (ValueError, OSError) as error:
        raise InputError(f"cannot write picture {path}: {error}") from None
