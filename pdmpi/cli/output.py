"""What commands print: one JSON document, or tables for people; progress on stderr."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from types import TracebackType
from typing import Any, TypeVar

import click
import numpy as np
from rich import box, progress
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdmpi.cli.terminal import is_terminal

__all__ = ["Progress", "emit", "json_option", "table"]

_Command = TypeVar("_Command", bound=Callable[..., Any])

_LOG_WIDTH = 160
"""Columns of a table that goes to a file or a pipe."""


def json_option(command: _Command) -> _Command:
    """Add ``--json``, passed to the command as ``as_json``."""
    text = "Print one JSON document instead of a table."
    return click.option("--json", "as_json", is_flag=True, help=text)(command)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table for `emit`; columns whose cells are all numbers are aligned right."""
    cells = [list(row) for row in rows]
    made = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    for i, name in enumerate(columns):
        numeric = all(_is_number(row[i]) for row in cells)
        made.add_column(Text(name), justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        made.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    return made


def emit(data: object, shown: RenderableType | Sequence[RenderableType], as_json: bool) -> None:
    """Print ``data`` as one JSON document, or ``shown`` (a table, text, or several) for people.

    A text alone, which may be a script, is printed as it is; lines among tables are wrapped.
    Keys are snake_case with units as suffixes (``_s``, ``_bytes``, ``_per_s``).  NumPy
    arrays and scalars, dataclasses, paths and sets are written as JSON's own types; NaN
    and infinities, which JSON lacks, as ``null``.
    """
    if as_json:
        click.echo(json.dumps(_plain(data), indent=2, allow_nan=False))
        return
    if isinstance(shown, str):
        click.echo(shown)
        return
    console = _console()
    console.print(Group(*shown) if isinstance(shown, (list, tuple)) else shown, highlight=False, markup=False)


class Progress:
    """Progress of a long command: a bar on a terminal, a line every few seconds in a log.

    Parameters
    ----------
    label
        What is being done.
    total
        Steps until it is done; 0 until `update` tells.
    interval_s
        Seconds between two lines of a log.
    shown
        False for ranks that keep silent.
    """

    def __init__(self, label: str, total: int = 0, *, interval_s: float = 5.0, shown: bool = True) -> None:
        self._label = label
        self._total = total
        self._interval_s = interval_s
        self._shown = shown
        self._next_s = 0.0
        self._bar: progress.Progress | None = None
        if shown and is_terminal(2):
            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"), progress.BarColumn(),
                progress.MofNCompleteColumn(), progress.TimeRemainingColumn(),
                progress.TextColumn("{task.fields[note]}"),
                console=Console(stderr=True, force_terminal=True), transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task(label, total=total, note="")

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, completed: int, note: str = "", total: int | None = None) -> None:
        """Say that ``completed`` steps are done, with a short note (the loss, a layer's name)."""
        self._total = self._total if total is None else total
        if self._bar:
            self._bar.update(self._task, completed=completed, total=self._total, note=note)
        elif self._shown and (completed >= self._total or time.monotonic() >= self._next_s):
            self._next_s = time.monotonic() + self._interval_s
            click.echo(f"{self._label}: {completed}/{self._total} {note}".rstrip(), err=True)


def _console() -> Console:
    if is_terminal(1):
        return Console(force_terminal=True)
    return Console(force_terminal=False, width=_LOG_WIDTH)


def _is_number(cell: object) -> bool:
    text = str(cell).split(" ")[0] if cell is not None else ""
    return not text or text[0].isdigit() or (text[0] in "-+." and text[1:2].isdigit())


def _plain(value: object) -> object:
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=str)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value
