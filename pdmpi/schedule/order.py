"""What a generator of schedules says: for every rank, the order of its forwards and backwards.

Everything else (updates, recomputations, messages, slots, versions, reductions) follows
from the order and is added by `pdmpi.schedule.lower`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pdmpi.schedule.program import Op, Topology

__all__ = ["Actions", "Order", "Versions", "actions", "joined", "parse_actions", "text_of"]

Actions = NDArray[np.int32]
"""Computations of one rank in order, shape (actions, 3): op, stage, microbatch."""

Versions = Callable[[int, NDArray[np.int64]], NDArray[np.int64]]
"""``versions(stage, microbatches)``: the weight version that each microbatch uses at a stage."""

LETTERS = {Op.FORWARD: "F", Op.BACKWARD: "B", Op.BACKWARD_INPUT: "I", Op.BACKWARD_WEIGHT: "W"}
_OPS = {letter: op for op, letter in LETTERS.items()}
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True)
class Order:
    """The order of every rank's computations.

    Attributes
    ----------
    schedule
        Name of the generator.
    topology
        Stages, ranks and edges.
    num_microbatches
        Microbatches that enter the pipeline.
    microbatches_per_update
        Microbatches whose gradients one update averages, over all replicas of the stage; 0
        where nothing is trained.
    actions
        One array a rank.
    versions
        The version that a microbatch uses; ``None`` for the newest one at its forward.
    """

    schedule: str
    topology: Topology
    num_microbatches: int
    microbatches_per_update: tuple[int, ...]
    actions: tuple[Actions, ...] = field(repr=False)
    versions: Versions | None = field(default=None, repr=False)


def actions(
    ops: Op | NDArray[np.integer], stages: int | NDArray[np.integer], microbatches: NDArray[np.integer]
) -> Actions:
    """Return rows of (op, stage, microbatch), scalars repeated."""
    rows = np.empty((len(microbatches), 3), np.int32)
    rows[:, 0] = ops
    rows[:, 1] = stages
    rows[:, 2] = microbatches
    return rows


def joined(parts: Sequence[Actions]) -> Actions:
    """Return the parts one behind the other."""
    return np.concatenate(parts) if parts else np.empty((0, 3), np.int32)


def parse_actions(text: str) -> Actions:
    """Decode ``"0F0 0F1 0B0"``: stage, letter (F, B, I input part, W weight part), microbatch.

    Raises
    ------
    ValueError
        For a word that is no action.
    """
    rows = []
    for word in text.split():
        found = _ACTION.fullmatch(word)
        if not found:
            raise ValueError(f"{word!r} is no action; write stage, one of F B I W, microbatch: '2F0'")
        stage, letter, microbatch = found.groups()
        rows.append((int(_OPS[letter]), int(stage), int(microbatch)))
    return np.array(rows, np.int32).reshape(-1, 3)


def text_of(rows: Actions) -> str:
    """Return the text form of a rank's order; the inverse of `parse_actions`."""
    return " ".join(f"{stage}{LETTERS[Op(op)]}{microbatch}" for op, stage, microbatch in rows.tolist())
