"""The layer graph as a picture: one box a layer, with its time and sizes, arrows for values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdmpi.plan.figures import COLOURS, figure, save
from pdmpi.plan.plan import StagePlan
from pdmpi.plan.profile import LayerCost, Profile
from pdmpi.plan.units import human_bytes, human_seconds

__all__ = ["draw_graph"]

_ROWS = 40
_WIDTH, _HEIGHT = 3.4, 0.62
_CHARACTER = 0.0446
"""Inches; an axis unit is one."""
_BEND = 0.35
"""How far an arrow that passes other boxes swings out."""


@dataclass(frozen=True, slots=True)
class _Box:
    x: float
    y: float
    column: int
    text: str

    @property
    def right(self) -> float:
        """Where the box ends."""
        return self.x + _CHARACTER / 2 * max(map(len, self.text.splitlines())) + 0.05


def draw_graph(profile: Profile, path: Path, stages: Sequence[StagePlan] = ()) -> None:
    """Draw the layers top down, in columns of at most forty.

    Boxes are coloured by stage when stages are given, else the darker the longer a layer takes.
    Arrows into another column are dashed.
    """
    boxes, wide, high = _boxes(profile)
    made, (axes,) = figure(min(wide, 150) + 0.5, high + 0.5)
    colours = _by_stage(profile, stages) if stages else _by_time(profile.costs)
    for i, layer in enumerate(profile.graph.layers):
        for source in {profile.graph.index[ref.layer] for ref in layer.inputs}:
            _arrow(axes, boxes[source], boxes[i])
        style = {"boxstyle": "round", "facecolor": colours[i], "linewidth": 0.4}
        box = boxes[i]
        axes.text(box.x, box.y, box.text, ha="center", va="center", fontsize=6, bbox=style, zorder=2)
    axes.set_xlim(-_WIDTH / 2, wide - _WIDTH / 2)
    axes.set_ylim(-high + _HEIGHT / 2, _HEIGHT / 2)
    axes.axis("off")
    save(made, path)


def _boxes(profile: Profile) -> tuple[list[_Box], float, float]:
    """Return each layer's box, and how wide and high all are together."""
    rows: list[int] = []
    for layer in profile.graph.layers:  # as far down as the longest path to it
        rows.append(1 + max((rows[profile.graph.index[ref.layer]] for ref in layer.inputs), default=-1))
    columns = -(-(max(rows) + 1) // _ROWS)
    length = -(-(max(rows) + 1) // columns)
    members: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault(row, []).append(i)
    widths = [
        max(len(found) for row, found in members.items() if row // length == column)
        for column in range(columns)
    ]
    lefts = [sum(widths[:column]) + 0.5 * column for column in range(len(widths))]
    boxes = []
    for i, row in enumerate(rows):
        column = row // length
        x = (lefts[column] + members[row].index(i)) * _WIDTH
        boxes.append(_Box(x, -(row % length) * _HEIGHT, column, _text(profile, i)))
    return boxes, (lefts[-1] + widths[-1]) * _WIDTH, length * _HEIGHT


def _text(profile: Profile, i: int) -> str:
    layer, cost = profile.graph.layers[i], profile.costs[i]
    facts = [
        human_seconds(cost.forward_s + cost.backward_s),
        f"{human_bytes(cost.output_bytes)} out",
        *([f"{human_bytes(cost.parameter_bytes)} weights"] if cost.parameter_bytes else []),
    ]
    return f"{layer.name} ({layer.kind})\n{', '.join(facts)}"


def _arrow(axes: Any, source: _Box, target: _Box) -> None:
    style: dict[str, Any] = {"arrowstyle": "->", "color": "0.4", "lw": 0.7}
    start, end = (source.x, source.y - 0.2), (target.x, target.y + 0.2)
    down = source.y - target.y
    if source.column != target.column:
        style |= {"linestyle": "--", "color": "0.6"}
    elif source.x == target.x and down > 1.5 * _HEIGHT:  # past the boxes between them
        side = max(source.right, target.right)
        start, end = (source.right, source.y), (target.right, target.y)
        style["connectionstyle"] = f"arc3,rad={-(_BEND + side - target.right) / down:.3f}"
    axes.annotate("", end, start, arrowprops=style, zorder=1)


def _by_stage(profile: Profile, stages: Sequence[StagePlan]) -> list[str]:
    stage_of = {name: s for s, stage in enumerate(stages) for name in stage.layers}
    return [
        _lighter(COLOURS[stage_of[layer.name] % len(COLOURS)], 0.35) if layer.name in stage_of else "#ffffff"
        for layer in profile.graph.layers
    ]


def _by_time(costs: Sequence[LayerCost]) -> list[str]:
    times = [cost.forward_s + cost.backward_s for cost in costs]
    longest = max(times) or 1.0
    return [_lighter("#f58518", 0.05 + 0.85 * time / longest) for time in times]


def _lighter(colour: str, share: float) -> str:
    """Return a colour of which only a share is left, the rest white."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - share * (255 - channel)):02x}" for channel in channels)
