"""The pipeline diagram: a lane for each rank, a box for each computation, as in the papers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from pdmpi.schedule.program import Kind, Op, Program, Topology
from pdmpi.simulate.boxes import Box, boxes
from pdmpi.simulate.palette import ARROWS, EDGE, HATCHES, IDLE, colour, legend
from pdmpi.simulate.report import completions
from pdmpi.simulate.timeline import Timeline

__all__ = ["draw"]

_BOX_INCHES = 0.30
"""Width at which a number can still be read in a box."""
_MIN_INCHES, _MAX_INCHES = 8.0, 19.0
_LANE_INCHES = (0.12, 0.62)
_ALL_LANES_INCHES = 18.0
_TEXT_LANE_INCHES = 0.28
"""Height of a lane from which on boxes carry text."""

_MAX_RANKS = 96
_MARGIN_INCHES = 0.08
"""Room on the right for an update at the very end."""
_SQUEEZE = 1.2
"""A program that would need this much more than a page is still shown whole."""

_Span = tuple[float, float]


def draw(timeline: Timeline, path: Path, *, measured: Timeline | None = None, title: str = "") -> None:
    """Draw a timeline into a picture file.

    A program too long for one page is shown in two panels: its beginning, until the pipeline
    is full, and a part of what it then does over and over.

    Parameters
    ----------
    timeline
        The prediction.
    path
        The picture; its suffix chooses the format (``.png``, ``.svg``, ``.pdf``).
    measured
        A run of the same program, drawn below the prediction rank by rank.
    title
        Heading; names the schedule and its shape by default.
    """
    program = timeline.program
    lanes = _lanes(timeline, measured)
    spans = _spans(timeline)
    widths = [end - begin for begin, end in spans]
    shown_s = sum(widths)
    inches = float(np.clip(shown_s / _smallest(timeline, spans) * _BOX_INCHES, _MIN_INCHES, _MAX_INCHES))
    lane_inches = float(np.clip(_ALL_LANES_INCHES / len(lanes), *_LANE_INCHES))
    figure = Figure(figsize=(inches + 2.0, lane_inches * len(lanes) + 2.0), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(spans), sharey=True, squeeze=False, width_ratios=widths)[0]
    factor, unit = _unit(shown_s)
    style = _Style(program, factor, inches / (shown_s * factor), lane_inches)
    painters = [_Painter(axes, span, style) for axes, span in zip(panels, spans, strict=True)]
    for painter in painters:
        painter.paint(lanes)
    _label_axes(panels, lanes, spans, factor, unit, margin_s=_MARGIN_INCHES / inches * shown_s)
    figure.suptitle(title or _title(program), fontsize=12, x=0.01, ha="left")
    used = frozenset().union(*(painter.used for painter in painters))
    lighter = style.lighter if any(painter.lightened for painter in painters) else ""
    handles = legend(used, lighter, style.versions)
    figure.legend(handles=handles, loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)


@dataclass(frozen=True)
class _Lane:
    """One row of the diagram: a rank on one of the timelines."""

    timeline: Timeline
    rank: int
    label: str


def _lanes(timeline: Timeline, measured: Timeline | None) -> list[_Lane]:
    topology = timeline.program.topology
    lanes = []
    for rank in _ranks(topology):
        played = [(s, own.index(rank)) for s, own in enumerate(topology.ranks) if rank in own]
        names = [f"{s}" if len(topology.ranks[s]) == 1 else f"{s} · replica {r}" for s, r in played]
        label = f"{'stages' if len(names) > 1 else 'stage'} {', '.join(names)}"
        label += "" if names == [f"{rank}"] else f"\nrank {rank}"
        if measured is None:
            lanes.append(_Lane(timeline, rank, label))
        else:
            lanes.append(_Lane(timeline, rank, f"{label}\npredicted"))
            lanes.append(_Lane(measured, rank, "measured"))
    return lanes


def _ranks(topology: Topology) -> list[int]:
    """Return the ranks that are shown: all, or the first and the last of very many."""
    ranks = list(range(topology.num_ranks))
    half = _MAX_RANKS // 2
    return ranks if len(ranks) <= _MAX_RANKS else ranks[:half] + ranks[-half:]


def _smallest(timeline: Timeline, spans: Sequence[_Span]) -> float:
    """Return the duration of the boxes that must hold a number: the shorter ones, but not the shortest."""
    durations = [
        box.end_s - box.start_s
        for begin, end in spans
        for rank in range(min(timeline.program.topology.num_ranks, 32))
        for box in boxes(timeline, rank, begin, end)
        if box.op not in (Op.UPDATE, Op.WAIT_REDUCE)
    ]
    return float(np.quantile(durations, 0.1)) if durations else timeline.duration_s or 1.0


def _spans(timeline: Timeline) -> list[_Span]:
    """Return the parts of the time that are shown."""
    whole = timeline.duration_s or 1.0
    fits = _smallest(timeline, [(0.0, whole / 8)]) * _MAX_INCHES / _BOX_INCHES
    if whole <= fits * _SQUEEZE:
        return [(0.0, whole)]
    ended = completions(timeline)
    filling = float(np.clip(ended.min() * 1.25, fits * 0.4, fits * 0.6))
    window = max(timeline.program.microbatches_per_update)
    middle = len(ended) // 2 // window * window if window else 0
    steady = max(float(ended[:middle].max(initial=0.0)), filling)
    return [(0.0, filling), (steady, min(steady + fits - filling, whole))]


def _unit(seconds: float) -> tuple[float, str]:
    """Return units a second and the unit for an axis of this length."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 2.0:
            return factor, unit
    return 1e6, "µs"


def _title(program: Program) -> str:
    replicas = [len(own) for own in program.topology.ranks]
    stages = f"{len(replicas)} stage{'s' if len(replicas) > 1 else ''}"
    shape = f" ({'-'.join(map(str, replicas))} replicas)" if max(replicas) > 1 else ""
    title = f"{program.schedule}: {stages}{shape}, {program.num_microbatches} microbatches"
    ranks = program.topology.num_ranks
    shown = f"; the first and the last {_MAX_RANKS // 2} of {ranks} ranks" if ranks > _MAX_RANKS else ""
    return title + shown


def _label_axes(
    panels: Sequence[Axes], lanes: Sequence[_Lane], spans: Sequence[_Span], factor: float, unit: str,
    margin_s: float,
) -> None:  # fmt: skip
    for axes, (begin, end) in zip(panels, spans, strict=True):
        axes.set_xlim(begin * factor, (end + margin_s) * factor)
        axes.set_ylim(len(lanes) - 0.4, -0.6)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0, labelsize=9)
        axes.set_xlabel(f"time ({unit})")
    panels[0].set_yticks(range(len(lanes)), [lane.label for lane in lanes])
    if len(panels) > 1:
        panels[0].set_title("the pipeline fills", fontsize=10, loc="left")
        panels[1].set_title("later, in the steady state", fontsize=10, loc="left")
        panels[1].tick_params(axis="y", labelleft=False)


class _Style:
    """What all panels share: scales, and how boxes are shaded and labelled.

    Attributes
    ----------
    lighter
        What lighter boxes mean; empty where there are none.
    versions
        Whether boxes show the version of the weights they use.
    """

    def __init__(self, program: Program, factor: float, inches_per_unit: float, lane_inches: float) -> None:
        self.factor = factor
        self.inches_per_unit = inches_per_unit
        self.lane_inches = lane_inches
        ranks = program.topology.ranks
        self._replicas = [len(own) for own in ranks]
        self._per_update = program.microbatches_per_update
        self._order = [sum(bool(set(own) & set(ranks[t])) for t in range(s)) for s, own in enumerate(ranks)]
        self.versions = any(count > 1 for count in (slots.weights for slots in program.slots))
        if any(self._order):
            self.lighter = "every other stage of a rank"
        elif any(n > r for n, r in zip(self._per_update, self._replicas, strict=True)):
            self.lighter = "every other minibatch"
        else:
            self.lighter = ""

    def light(self, box: Box) -> bool:
        """Return whether a box is painted in the lighter variant."""
        if any(self._order):
            return self._order[box.stage] % 2 == 1
        window = self._per_update[box.stage]
        return window > self._replicas[box.stage] and box.microbatch // window % 2 == 1

    def texts(self, box: Box) -> tuple[str, str]:
        """Return the large and the small text of a box."""
        small = f"v{box.version}" if self.versions else ""
        if any(self._order):
            small = f"s{box.stage}" + (f" {small}" if small else "")
        return str(box.microbatch), small


class _Painter:
    """Paints lanes into one panel.

    Attributes
    ----------
    used, lightened
        What was painted, and whether some of it in the lighter colours.
    """

    def __init__(self, axes: Axes, span: _Span, style: _Style) -> None:
        self._axes = axes
        self._begin, self._end = span
        self._style = style
        self.used: set[Op | Kind] = set()
        self.lightened = False

    def paint(self, lanes: Sequence[_Lane]) -> None:
        """Paint all lanes, and messages between them where they are of one timeline."""
        paired = len({id(lane.timeline) for lane in lanes}) > 1
        for y, lane in enumerate(lanes):
            height = 0.94 if paired else 0.74
            self._rectangle(y, height, self._begin, self._end, facecolor=IDLE, linewidth=0, zorder=1)
            for box in boxes(lane.timeline, lane.rank, self._begin, self._end):
                self.used.add(box.op)
                self._paint_box(box, y, height)
        if not paired:
            self._paint_transfers(lanes)

    def _rectangle(self, y: int, height: float, start_s: float, end_s: float, **style: Any) -> None:
        corner = (start_s * self._style.factor, y - height / 2)
        width = (end_s - start_s) * self._style.factor
        self._axes.add_patch(Rectangle(corner, width, height, **style))

    def _paint_box(self, box: Box, y: int, height: float) -> None:
        if box.op == Op.UPDATE:
            least = 0.04 / self._style.inches_per_unit / self._style.factor
            end = max(box.end_s, box.start_s + least)
            self._rectangle(y, height, box.start_s, end, facecolor=colour(box.op), linewidth=0, zorder=4)
            return
        light = self._style.light(box)
        self.lightened |= light
        self._rectangle(
            y, height, box.start_s, box.end_s, facecolor=colour(box.op, light), hatch=HATCHES.get(box.op),
            edgecolor=EDGE, linewidth=0.6, zorder=2,
        )  # fmt: skip
        if box.op != Op.WAIT_REDUCE:
            self._write(box, y, height)

    def _write(self, box: Box, y: int, height: float) -> None:
        """Write into a box what has room there."""
        start, end = max(box.start_s, self._begin), min(box.end_s, self._end)
        width = (end - start) * self._style.factor * self._style.inches_per_unit
        tall = height * self._style.lane_inches
        large, small = self._style.texts(box)
        if tall < _TEXT_LANE_INCHES * 0.74 or width < 0.075 * len(large) + 0.03:
            return
        x = (start + end) / 2 * self._style.factor
        both = bool(small) and tall >= 0.36 and width >= 0.062 * len(small) + 0.03
        place: dict[str, Any] = {"ha": "center", "va": "center", "clip_on": True, "zorder": 5}
        if box.op in HATCHES:
            place["path_effects"] = [
                withStroke(linewidth=3, foreground=colour(box.op, self._style.light(box)))
            ]
        self._axes.text(x, y - (0.14 * height if both else 0), large, fontsize=9, **place)
        if both:
            self._axes.text(x, y + 0.26 * height, small, fontsize=6.5, color="#333333", **place)

    def _paint_transfers(self, lanes: Sequence[_Lane]) -> None:
        """Paint a line for each message, from its sender's lane to its receiver's."""
        timeline = lanes[0].timeline
        moves = timeline.transfers
        lane_of = np.full(timeline.program.topology.num_ranks, -1)
        lane_of[[lane.rank for lane in lanes]] = np.arange(len(lanes))
        shown = (moves.start_s < self._end) & (moves.end_s > self._begin) & (moves.end_s > moves.start_s)
        shown &= (lane_of[moves.source] >= 0) & (lane_of[moves.target] >= 0) & (moves.source != moves.target)
        kinds = np.array([channel.kind for channel in timeline.program.channels], np.int64)
        for kind in Kind:
            chosen = np.flatnonzero(shown & (kinds[moves.channel] == kind))
            if not len(chosen):
                continue
            times = np.stack([moves.start_s[chosen], moves.end_s[chosen]], axis=1) * self._style.factor
            source, target = lane_of[moves.source[chosen]], lane_of[moves.target[chosen]]
            edge = 0.37 * np.sign(target - source)
            lines = np.stack([times, np.stack([source + edge, target - edge], axis=1)], axis=2)
            self.used.add(kind)
            far = np.abs(target - source) > 1
            for some, order in ((lines[~far], 3.0), (lines[far], 1.5)):  # behind the boxes on their way
                self._axes.add_collection(
                    LineCollection(list(some), colors=ARROWS[kind], linewidths=1.2, zorder=order)
                )
