"""The order of kernels, copies and messages of `CudaTransport`, over a stand-in for CuPy.

The same checks run on GPUs in ``tests/gpu``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from launch import REPOSITORY, each_mpi, mpirun

HERE = Path(__file__).parent


@each_mpi
@pytest.mark.parametrize("way", ["aware", "staged"])
def test_kernels_copies_and_messages_keep_their_order(way: str, mpi: str) -> None:
    paths = [HERE / "stand_in", REPOSITORY, REPOSITORY / "tests"]
    env = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    job = mpirun(2, [HERE / "cuda_checks.py", way, "mpi"], mpi, env=env)
    results = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
    assert len(results) == 7
    errors = [f"{result['name']}: {error}" for result in results for error in result["errors"] if error]
    assert not errors, "\n".join(errors)
