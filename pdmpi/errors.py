"""Errors that end a command, each with the exit code it leads to.

Exit codes: 0 done, 1 error, 2 bad input, 75 checkpointed and wants to be requeued.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["InputError", "PdmpiError", "RankFailure", "Requeue", "nearest"]


class PdmpiError(Exception):
    """An error that is shown to the user as one line, without a traceback."""

    exit_code = 1


class InputError(PdmpiError):
    """Bad input: the message names the knob, its value and the remedy.

    Raised before anything is allocated or overwritten.
    """

    exit_code = 2

    @classmethod
    def collect(cls, problems: Iterable[str]) -> None:
        """Raise one error that lists every problem, or return when there is none."""
        found = list(problems)
        if found:
            raise cls("; ".join(found))


class RankFailure(PdmpiError):
    """A rank died or fell silent; the message names rank, stage and cause."""


class Requeue(PdmpiError):
    """The run was checkpointed and asks to be requeued."""

    exit_code = 75


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known name, or the list of them all."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"
