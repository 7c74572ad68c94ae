"""Processes that each believe they are alone are told so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from launch import MPIS, REPOSITORY, command

from pdmpi.errors import InputError
from pdmpi.transport.launcher import check_world_size, local_rank, local_size

MISSING = [mark for parameter in MPIS for mark in parameter.marks if mark.name == "skipif" and mark.args[0]]


@pytest.mark.parametrize(
    "environ",
    [
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {"PMI_SIZE": "4"},
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"},
    ],
)
def test_singletons_are_found(environ: dict[str, str]) -> None:
    with pytest.raises(InputError, match=r"started 4 processes .* MPI sees one in each: .* some MPI"):
        check_world_size(1, "some MPI", environ)
    check_world_size(4, "some MPI", environ)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"SLURM_NTASKS": "4"},
        {"OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"},
    ],
)
def test_a_world_of_one_is_fine(environ: dict[str, str]) -> None:
    check_world_size(1, "some MPI", environ)


def test_the_launchers_variables_come_before_slurms() -> None:
    environ = {"SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert (local_rank(environ), local_size(environ)) == (3, 4)
    assert (local_rank({"MPI_LOCALRANKID": "1"}), local_size({"MPI_LOCALNRANKS": "2"})) == (1, 2)
    assert (local_rank({}), local_size({})) == (None, None)


@pytest.mark.mpi
@pytest.mark.skipif(bool(MISSING), reason="needs both Open MPI and MPICH")
def test_the_wrong_launcher_is_found() -> None:
    """MPICH's mpiexec with a Python that uses Open MPI.  (The other way round MPICH itself refuses.)"""
    code = "from pdmpi.transport.mpi import MpiTransport; MpiTransport()"
    arguments = command(2, ["-c", code], "mpich")
    arguments[arguments.index("-c") - 1] = sys.executable
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    job = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=600)
    assert job.returncode != 0
    assert "the launcher started 2 processes (PMI_SIZE=2)" in job.stderr
    assert "Open MPI" in job.stderr
