"""Programs as text for people: the grid of the papers' figures, one line a rank.

A cell is one tick: a forward takes one, a backward two, or one for each of its parts;
transfers take none.  ``F3`` is the forward of microbatch 3, ``B`` a backward, ``I`` and ``W``
its input and weight parts, ``R`` a recomputation; a rank that plays several stages has the
stage in front, ``2F3``.  ``-`` goes on with the cell before, ``.`` is idle, ``?F3`` is never
reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdmpi.schedule.execution import UNIT_COSTS, execute
from pdmpi.schedule.order import LETTERS
from pdmpi.schedule.program import Op, Program
from pdmpi.schedule.violation import Fault, Violation

__all__ = ["grid", "marked_grid"]

_HERE = "<-- ERROR HERE"
_WINDOW = 12
"""Ticks drawn on either side of an error."""
_NEIGHBOURS = 3
"""Ranks drawn on either side of an error."""
_PLACES = 3
"""Places of errors that get a grid of their own when they are far apart."""


@dataclass(frozen=True, slots=True)
class _Cell:
    start: int
    length: int
    label: str
    row: int


def grid(program: Program) -> str:
    """Return the grid of a whole program."""
    lines = _lines(program, execute(program).start)
    end = max((cell.start + cell.length for line in lines for cell in line), default=0)
    return _drawn(lines, range(len(lines)), 0, end, {})


def marked_grid(program: Program, found: Sequence[Violation]) -> str:
    """Return the parts of the grid where violations are, each marked ``<-- ERROR HERE``."""
    if any(v.fault is Fault.SHAPE and v.rank < 0 for v in found):
        return ""
    if any(v.fault is Fault.SHAPE for v in found):
        start = tuple(np.full(len(rows), -1) for rows in program.rows)
    else:
        start = execute(program).start
    lines = _lines(program, start)
    marks: dict[int, set[int]] = {}
    for violation in found:
        if violation.rank >= 0:
            marks.setdefault(violation.rank, set()).update(_tick(lines[violation.rank], violation.row))
    drawn: list[str] = []
    shown: list[tuple[int, int]] = []
    for rank, ticks in marks.items():
        for tick in sorted(ticks) or [0]:
            near = any(abs(rank - r) <= _NEIGHBOURS and abs(tick - t) < _WINDOW for r, t in shown)
            if near or len(drawn) == _PLACES:
                continue
            shown.append((rank, tick))
            ranks = range(max(0, rank - _NEIGHBOURS), min(len(lines), rank + _NEIGHBOURS + 1))
            drawn.append(_drawn(lines, ranks, max(0, tick - _WINDOW), tick + _WINDOW + 1, marks))
    return "\n\n".join(drawn)


def _lines(program: Program, start: Sequence[NDArray[np.int64]]) -> list[list[_Cell]]:
    """Return each rank's cells; those never reached come behind all others."""
    played = np.bincount([rank for ranks in program.topology.ranks for rank in ranks])
    letters = {**LETTERS, Op.RECOMPUTE: "R"}
    lines = []
    for rank, rows in enumerate(program.rows):
        cells: list[_Cell] = []
        for row in np.flatnonzero(np.isin(rows[:, 0], list(letters))).tolist():
            op, stage, k = Op(int(rows[row, 0])), int(rows[row, 1]), int(rows[row, 2])
            begin = int(start[rank][row])
            label = f"{stage if played[rank] > 1 else ''}{letters[op]}{k}"
            if begin < 0:
                begin, label = (cells[-1].start + cells[-1].length if cells else 0), f"?{label}"
            cells.append(_Cell(begin, UNIT_COSTS[op], label, row))
        lines.append(cells)
    return lines


def _tick(cells: Sequence[_Cell], row: int) -> set[int]:
    """Return the tick of the computation that an instruction stands at; nothing without a place."""
    if row < 0 or not cells:
        return set()
    return {next((cell for cell in cells if cell.row >= row), cells[-1]).start}


def _drawn(
    lines: Sequence[Sequence[_Cell]], ranks: range, first: int, end: int, marks: dict[int, set[int]]
) -> str:
    labels = [cell.label for rank in ranks for cell in lines[rank] if first <= cell.start < end]
    width = max(map(len, labels), default=1) + (2 if marks else 0)
    end = min(end, max((c.start + c.length for rank in ranks for c in lines[rank]), default=0))
    head = max(len(f"rank {rank}") for rank in ranks)
    drawn = []
    for rank in ranks:
        ticks = ["."] * (end - first)
        for cell in lines[rank]:
            for tick in range(max(first, cell.start), min(end, cell.start + cell.length)):
                ticks[tick - first] = cell.label if tick == cell.start else "-"
        here = marks.get(rank)
        for tick in here or ():
            if first <= tick < end:
                ticks[tick - first] = f"[{ticks[tick - first]}]"
        marked = here is not None and (not here or any(first <= tick < end for tick in here))
        body = " ".join(text.ljust(width) for text in ticks)
        line = f"{f'rank {rank}'.ljust(head)}  {body}{'  ' + _HERE if marked else ''}".rstrip()
        drawn.append(line)
    return "\n".join(drawn)
