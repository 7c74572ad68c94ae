"""The checker: proves a program safe before anything is launched.

Every violation is found and shown at once, with the part of the grid that it is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmpi.errors import PdmpiError
from pdmpi.schedule.checks.coverage import check_coverage, check_messages, check_sequence
from pdmpi.schedule.checks.lifetimes import check_lifetimes
from pdmpi.schedule.checks.part import parts
from pdmpi.schedule.checks.progress import check_deadlock, check_order, check_reduction_order
from pdmpi.schedule.checks.shape import check_counts, check_shape
from pdmpi.schedule.checks.together import check_meetings
from pdmpi.schedule.checks.versions import check_joint_updates, check_updates, check_versions
from pdmpi.schedule.program import Program
from pdmpi.schedule.text import marked_grid
from pdmpi.schedule.violation import Violation

__all__ = ["CheckedProgram", "UnsafeProgram", "check", "violations"]

_PART_CHECKS = (
    check_coverage, check_sequence, check_messages, check_lifetimes, check_versions, check_updates,
)  # fmt: skip


class UnsafeProgram(PdmpiError):
    """A program that must not run; its message is one line, its `report` shows everything.

    Attributes
    ----------
    violations
        All that is wrong with it.
    """

    def __init__(self, program: Program, found: Sequence[Violation]) -> None:
        self.violations = tuple(found)
        self._program = program
        more = f" (and {len(found) - 1} more, which the report lists)" if len(found) > 1 else ""
        super().__init__(f"schedule {program.schedule!r} is unsafe: {found[0]}{more}")

    @property
    def report(self) -> str:
        """Every violation, a line each, and the grid with their places marked."""
        return "\n".join(
            [*map(str, self.violations), "", marked_grid(self._program, self.violations)]
        ).rstrip()


@dataclass(frozen=True)
class CheckedProgram:
    """A program that passed the checker: to make one is to check it.

    Raises
    ------
    UnsafeProgram
        With every violation.
    """

    program: Program

    def __post_init__(self) -> None:
        found = violations(self.program)
        if found:
            raise UnsafeProgram(self.program, found)


def check(program: Program) -> CheckedProgram:
    """Return the program as one that the executor runs.

    Raises
    ------
    UnsafeProgram
        With every violation and the grid, marked.
    """
    return CheckedProgram(program)


def violations(program: Program) -> list[Violation]:
    """Return all that is wrong with a program.

    When numbers lie outside what the program declares, only those are returned: the other
    checks read them.
    """
    found = list(check_shape(program))
    if found:
        return found
    found += check_counts(program)
    for part in parts(program):
        for check_part in _PART_CHECKS:
            found += check_part(part)
    found += check_joint_updates(program)
    found += check_meetings(program)
    found += check_order(program)
    found += check_reduction_order(program)
    found += check_deadlock(program)
    return found
