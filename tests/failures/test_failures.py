"""Whatever happens to one rank, the job ends soon, non-zero, and names rank and stage."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import pytest
from launch import each_mpi, mpirun

SCRIPT = Path(__file__).with_name("failing_job.py")

LIMIT_S = 10.0
NEVER_S = 600.0


def run(
    what: str, mpi: str, num_ranks: int = 3, culprit: int = 1,
    stall_timeout_s: float = NEVER_S, silence_timeout_s: float = NEVER_S,
) -> tuple[int, list[str]]:  # fmt: skip
    """Return the exit code and the lines on stderr that pdmpi wrote; the failure costs 10 s at most."""
    orderly_s, _ = orderly(mpi)
    begin = time.monotonic()
    timeouts = (str(stall_timeout_s), str(silence_timeout_s))
    job = mpirun(num_ranks, [SCRIPT, what, str(culprit), *timeouts], mpi, check=False)
    assert "running" in job.stdout, job.stderr
    assert time.monotonic() - begin < 3 * orderly_s + LIMIT_S
    return job.returncode, said(job.stderr)


def said(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("pdmpi: ")]


@cache
def orderly(mpi: str) -> tuple[float, list[str]]:
    """Return the seconds that such a job takes on this machine now when nothing fails, and what it said."""
    begin = time.monotonic()
    job = mpirun(4, [SCRIPT, "nothing", "0", str(NEVER_S), str(NEVER_S)], mpi)
    assert "running" in job.stdout, job.stderr
    return time.monotonic() - begin, said(job.stderr)


@each_mpi
def test_an_orderly_end_is_silent(mpi: str) -> None:
    assert orderly(mpi)[1] == []


@each_mpi
@pytest.mark.parametrize(("num_ranks", "culprit"), [(2, 0), (3, 1), (4, 3)])
def test_a_killed_rank_is_named(mpi: str, num_ranks: int, culprit: int) -> None:
    code, lines = run("kill", mpi, num_ranks, culprit)
    assert code != 0
    assert len(lines) == 1
    assert lines[0].startswith(f"pdmpi: error: rank {culprit} (stage {culprit}, replica 0, host ")
    assert ") died; ending rank " in lines[0]


@each_mpi
def test_an_exception_is_named(mpi: str) -> None:
    code, lines = run("exception", mpi)
    assert code == 1
    assert lines[0].startswith("pdmpi: error: rank 1 (stage 1, replica 0, host ")
    assert lines[0].endswith("failed: ZeroDivisionError: boom")
    assert all("died" not in line for line in lines)


@each_mpi
@pytest.mark.parametrize(("asked", "expected"), [(3, 3), (0, 1)])
def test_an_exit_in_the_middle_of_the_run_is_named(mpi: str, asked: int, expected: int) -> None:
    code, lines = run(f"exit-{asked}", mpi)
    assert code == expected
    assert len(set(lines)) == 1  # MPICH's launcher was seen to forward a line twice
    assert lines[0].startswith("pdmpi: error: rank 1 (stage 1, replica 0, host ")
    assert f"called sys.exit({asked}) in the middle of the run" in lines[0]


@each_mpi
def test_a_stopped_rank_is_named(mpi: str) -> None:
    code, lines = run("stop", mpi, stall_timeout_s=2)
    assert code == 1
    assert any("rank 1 (stage 1, replica 0" in line and "is stopped" in line for line in lines)
    assert any("nothing for 2 s" in line for line in lines)


@each_mpi
def test_a_silent_rank_is_named_long_before_its_messages_are_due(mpi: str) -> None:
    code, lines = run("stop", mpi, silence_timeout_s=4)
    assert code == 1
    assert any("rank 1 (stage 1, replica 0" in line and "is stopped" in line for line in lines)
    assert any("rank 1 (stage 1" in line and "gave no sign of life for 4 s" in line for line in lines)


@each_mpi
@pytest.mark.parametrize(("what", "code"), [("all-input-error", 2), ("all-requeue", 75)])
def test_what_every_rank_was_told_is_said_once(mpi: str, what: str, code: int) -> None:
    found, lines = run(what, mpi)
    assert found == code
    assert len(lines) == 1
