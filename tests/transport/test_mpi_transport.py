"""The checks of ``mpi_checks.py``, run in one job for each MPI library and number of ranks."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from launch import each_mpi, mpirun

SCRIPT = Path(__file__).with_name("mpi_checks.py")

NAMES = re.findall(r"^@check\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)
"""Read from the text, since importing the script starts MPI in this process."""


@functools.cache
def run(mpi: str, num_ranks: int) -> tuple[list[str], int, str]:
    """Run all checks once; return the names of those that passed, the exit code, and all that was said."""
    job = mpirun(num_ranks, [SCRIPT], mpi, check=False)
    passed = re.findall(r"^passed (\w+)$", job.stdout, re.MULTILINE)
    return passed, job.returncode, job.stdout + job.stderr


@each_mpi
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_transport(name: str, num_ranks: int, mpi: str) -> None:
    passed, _, said = run(mpi, num_ranks)
    assert name in passed, said


@each_mpi
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_ranks_leave_in_peace(num_ranks: int, mpi: str) -> None:
    _, code, said = run(mpi, num_ranks)
    assert code == 0, said
