"""The layer graph as a picture: one box a layer, with its time and sizes, arrows for values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdmpi.plan.figures import COLOURS, figure, save
from pdmpi.plan.plan import StagePlan
from pdmpi.plan.profile import Profile

__all__ = ["draw_graph"]

_ROWS = 40
_WIDTH, _HEIGHT = 3.4, 0.62


def _rows(profile: Profile) -> list[int]:
    """Return the length of the longest path to each layer."""
    rows: list[int] = []
    for layer in profile.graph.layers:
        rows.append(1 + max((rows[profile.graph.index[ref.layer]] for ref in layer.inputs), default=-1))
    return rows


def draw_graph(profile: Profile, path: Path, stages: Sequence[StagePlan] = ()) -> None:
    """Draw the layers top down, in columns of at most forty, coloured by stage when stages are given."""
    rows = _rows(profile)
    columns = -(-(max(rows) + 1) // _ROWS)
    length = -(-(max(rows) + 1) // columns)
    stage_of = {name: s for s, stage in enumerate(stages) for name in stage.layers}
    members: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault(row, []).append(i)
    widths = [
        max(len(found) for row, found in members.items() if row // length == column)
        for column in range(columns)
    ]
    lefts = [sum(widths[:column]) + 0.5 * column for column in range(len(widths))]
    at = {
        i: ((lefts[row // length] + k) * _WIDTH, -(row % length) * _HEIGHT)
        for row, found in members.items()
        for k, i in enumerate(found)
    }
    wide = (lefts[-1] + widths[-1]) * _WIDTH
    high = length * _HEIGHT
    made, (axes,) = figure(min(wide, 150) + 0.5, high + 0.5)
    for i, (layer, cost) in enumerate(zip(profile.graph.layers, profile.costs, strict=True)):
        x, y = at[i]
        for ref in layer.inputs:
            a, b = at[profile.graph.index[ref.layer]]
            style = {"arrowstyle": "->", "color": "0.5", "lw": 0.7}
            axes.annotate("", (x, y + 0.2), (a, b - 0.2), arrowprops=style)
        text = (
            f"{layer.name} ({layer.kind})\n{(cost.forward_s + cost.backward_s) * 1e3:.3g} ms, "
            f"{cost.output_bytes / 2**20:.3g} MiB out, {cost.parameter_bytes / 2**20:.3g} MiB weights"
        )
        colour = COLOURS[stage_of[layer.name] % len(COLOURS)] if layer.name in stage_of else "0.85"
        box = {"boxstyle": "round", "facecolor": colour, "alpha": 0.35, "linewidth": 0.4}
        axes.text(x, y, text, ha="center", va="center", fontsize=6, bbox=box)
    axes.set_xlim(-_WIDTH / 2, wide - _WIDTH / 2)
    axes.set_ylim(-high + _HEIGHT / 2, _HEIGHT / 2)
    axes.axis("off")
    save(made, path)
