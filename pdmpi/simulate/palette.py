"""Colours, hatches and names of a diagram's parts, and its legend."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pdmpi.schedule.program import Kind, Op

__all__ = ["ARROWS", "EDGE", "HATCHES", "IDLE", "NAMES", "colour", "legend"]

# Colours that people with any colour vision tell apart (Okabe and Ito, 2008).
_COLOURS: Mapping[Op, str] = MappingProxyType(
    {
        Op.FORWARD: "#56B4E9", Op.RECOMPUTE: "#56B4E9", Op.BACKWARD: "#E69F00", Op.BACKWARD_INPUT: "#E69F00",
        Op.BACKWARD_WEIGHT: "#4DB89A", Op.UPDATE: "#333333", Op.WAIT_REDUCE: "#F3D9E8",
    }
)  # fmt: skip
HATCHES: Mapping[Op, str] = MappingProxyType({Op.RECOMPUTE: "////", Op.WAIT_REDUCE: "...."})
NAMES: Mapping[Op, str] = MappingProxyType(
    {
        Op.FORWARD: "forward", Op.RECOMPUTE: "forward again (recomputation)", Op.BACKWARD: "backward",
        Op.BACKWARD_INPUT: "backward: gradients of inputs",
        Op.BACKWARD_WEIGHT: "backward: gradients of weights",
        Op.UPDATE: "weight update", Op.WAIT_REDUCE: "wait for other replicas",
    }
)  # fmt: skip
"""What people call each operation."""
ARROWS: Mapping[Kind, str] = MappingProxyType({Kind.ACTIVATION: "#0072B2", Kind.GRADIENT: "#B85500"})
IDLE = "#EDEDED"
EDGE = "#222222"

_LIGHTER = 0.5


def colour(op: Op, light: bool = False) -> tuple[float, float, float]:
    """Return the colour of an operation, or its lighter variant."""
    red, green, blue = to_rgb(_COLOURS[op])
    share = _LIGHTER if light else 0.0
    return red + (1 - red) * share, green + (1 - green) * share, blue + (1 - blue) * share


def legend(used: Collection[Op | Kind], lighter: str, versions: bool) -> list[Patch | Line2D]:
    """Return the entries of a legend.

    Parameters
    ----------
    used
        What the diagram shows.
    lighter
        What the lighter variants of the colours mean; empty where there are none.
    versions
        Whether boxes show the weight version they use.
    """
    entries: list[Patch | Line2D] = []
    for op, name in NAMES.items():
        if op in used and op != Op.UPDATE:
            patch = Patch(facecolor=colour(op), edgecolor=EDGE, linewidth=0.6, label=name)
            patch.set_hatch(HATCHES.get(op, ""))
            entries.append(patch)
    entries.append(Patch(facecolor=IDLE, label="idle"))
    if Op.UPDATE in used:
        entries.append(Line2D([], [], color=colour(Op.UPDATE), linewidth=3, label=NAMES[Op.UPDATE]))
    if Kind.ACTIVATION in used:
        entries.append(Line2D([], [], color=ARROWS[Kind.ACTIVATION], label="activations on their way"))
    if Kind.GRADIENT in used:
        entries.append(Line2D([], [], color=ARROWS[Kind.GRADIENT], label="gradients on their way"))
    notes = ["numbers: microbatch"]
    if versions:
        notes.append("v: version of the weights used")
    if lighter:
        notes.append(f"lighter: {lighter}")
    entries += [Line2D([], [], linestyle="none", label=note) for note in notes]
    return entries
