"""The text form of a program: complete, readable, and the same program when parsed again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import numpy as np

from pdmpi.errors import InputError
from pdmpi.schedule.program import (
    NUM_COLUMNS,
    Channel,
    Group,
    Instruction,
    Kind,
    Program,
    SlotCounts,
    Topology,
)

__all__ = ["dump", "parse"]

_TITLE = "pdmpi program 2"


def dump(program: Program) -> str:
    """Return a program as text.

    Returns
    -------
    str
        A head of one line for the title, the schedule, the count of microbatches, and each
        stage, edge, channel and group; then, for each rank, ``rank 3`` and its instructions.
    """
    return "\n".join(_lines(program)) + "\n"


def _lines(program: Program) -> Iterator[str]:
    yield _TITLE
    yield f"schedule {program.schedule}"
    yield f"microbatches {program.num_microbatches}"
    for stage, ranks in enumerate(program.topology.ranks):
        slots = " ".join(f"{name}={count}" for name, count in asdict(program.slots[stage]).items())
        per_update = program.microbatches_per_update[stage]
        yield f"stage ranks={_joined(ranks)} per_update={per_update} {slots}"
    for source, target in program.topology.edges:
        gradient = int((source, target) not in program.topology.no_gradient)
        yield f"edge source={source} target={target} gradient={gradient}"
    for channel in program.channels:
        source, target = channel.source_stage, channel.target_stage
        yield f"channel kind={channel.kind.name} source={source} target={target}"
    for group in program.groups:
        yield f"group stage={group.stage} ranks={_joined(group.ranks)} statistics={int(group.statistics)}"
    for rank in range(len(program.rows)):
        yield f"rank {rank}"
        yield from (f"  {instruction}" for instruction in program.instructions(rank))


def parse(text: str) -> Program:
    """Return the program that a text describes; the inverse of `dump`.

    Raises
    ------
    InputError
        Naming the line that is no part of a program.
    """
    if not text.strip():
        raise InputError("no text of a program: the file is empty")
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            reader.read(line)
        except (KeyError, IndexError, ValueError) as error:
            raise InputError(f"line {number} of the program, {line.strip()!r}: {error}") from error
    return reader.program()


class _Reader:
    """A program as far as it has been read."""

    def __init__(self) -> None:
        self._title = ""
        self._schedule = ""
        self._num_microbatches = 0
        self._ranks: list[tuple[int, ...]] = []
        self._per_update: list[int] = []
        self._slots: list[SlotCounts] = []
        self._edges: list[tuple[int, int]] = []
        self._no_gradient: set[tuple[int, int]] = set()
        self._channels: list[Channel] = []
        self._groups: list[Group] = []
        self._rows: list[list[list[int]]] = []

    def read(self, line: str) -> None:
        if not self._title:
            if line != _TITLE:
                raise ValueError(f"a program starts with {_TITLE!r}")
            self._title = line
        elif line.startswith(" "):
            self._rows[-1].append(Instruction.parse(line).row)
        elif line:
            self._head(line)

    def _head(self, line: str) -> None:
        word, *rest = line.split()
        if word == "schedule":
            (self._schedule,) = rest
        elif word == "microbatches":
            self._num_microbatches = int(rest[0])
        elif word == "rank":
            if int(rest[0]) != len(self._rows):
                raise ValueError(f"rank {len(self._rows)} is due")
            self._rows.append([])
        else:
            self._part(word, dict(pair.split("=") for pair in rest))

    def _part(self, word: str, values: dict[str, str]) -> None:
        if word == "stage":
            self._ranks.append(_split(values.pop("ranks")))
            self._per_update.append(int(values.pop("per_update")))
            names = asdict(SlotCounts())
            self._slots.append(SlotCounts(**{name: int(values[name]) for name in names}))
        elif word == "edge":
            edge = (int(values["source"]), int(values["target"]))
            self._edges.append(edge)
            if values["gradient"] == "0":
                self._no_gradient.add(edge)
        elif word == "channel":
            source, target = int(values["source"]), int(values["target"])
            self._channels.append(Channel(Kind[values["kind"]], source, target))
        elif word == "group":
            statistics = bool(int(values["statistics"]))
            self._groups.append(Group(int(values["stage"]), _split(values["ranks"]), statistics))
        else:
            raise ValueError(f"{word!r} begins no line of a program")

    def program(self) -> Program:
        topology = Topology(tuple(self._ranks), tuple(self._edges), frozenset(self._no_gradient))
        return Program(
            schedule=self._schedule,
            topology=topology,
            num_microbatches=self._num_microbatches,
            microbatches_per_update=tuple(self._per_update),
            channels=tuple(self._channels),
            groups=tuple(self._groups),
            slots=tuple(self._slots),
            rows=tuple(np.array(rows, np.int32).reshape(-1, NUM_COLUMNS) for rows in self._rows),
        )


def _joined(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks))


def _split(text: str) -> tuple[int, ...]:
    return tuple(int(rank) for rank in text.split(","))
