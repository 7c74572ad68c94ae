"""The checks of ``mpi_checks.py``, run in one job for each MPI library and number of ranks."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from launch import each_mpi, mpirun

SCRIPT = Path(__file__).with_name("mpi_checks.py")

NAMES = re.findall(r"^@check\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)
"""Read from the text, since importing the script starts MPI in this process."""


@functools.cache
def results(mpi: str, num_ranks: int) -> dict[str, Any]:
    """Run all checks once, and return what each said."""
    job = mpirun(num_ranks, [SCRIPT], mpi)
    lines = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines}


@each_mpi
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_transport(name: str, num_ranks: int, mpi: str) -> None:
    errors = [error for error in results(mpi, num_ranks)[name]["errors"] if error]
    assert not errors, "\n".join(errors)
