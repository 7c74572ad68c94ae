"""The order of kernels, copies and messages of `CudaTransport`, over a stand-in for CuPy.

The same checks run on GPUs in ``tests/gpu``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from launch import REPOSITORY, each_mpi, mpirun

HERE = Path(__file__).parent


def stand_in() -> dict[str, str]:
    paths = [HERE / "stand_in", REPOSITORY, REPOSITORY / "tests"]
    return {"PYTHONPATH": os.pathsep.join(map(str, paths))}


@each_mpi
@pytest.mark.parametrize("way", ["aware", "staged"])
def test_kernels_copies_and_messages_keep_their_order(way: str, mpi: str) -> None:
    job = mpirun(2, [HERE / "cuda_checks.py", way, "mpi"], mpi, env=stand_in())
    assert job.stdout.count("passed") == 7


OPEN = """
import sys, cupy
from pdmpi.errors import InputError
from pdmpi.transport.open import open_cuda_transport
stream = cupy.cuda.Stream()
device, collectives = sys.argv[1:]
try:
    transport, notes = open_cuda_transport(
        20.0, compute_stream=lambda: stream.ptr, ucx="", num_devices=1, device=device, collectives=collectives
    )
except InputError as error:
    print("refused:", error)
else:
    for note in notes:
        print("note:", note)
    transport.close()
"""


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("device", "collectives", "expected"),
    [
        ("cuda", "auto", r"(?s)refused: transport.device = 'cuda', but Open MPI.* takes no device memory"),
        ("host", "nccl", "refused: collectives.backend = 'nccl', but ranks 0, 1 share one GPU of host"),
        ("host", "auto", "^note: ranks 0, 1 share one GPU .*summed by MPI through the host\n$"),
        ("auto", "mpi", r"(?s)note: .*note: Open MPI.* pass through pinned host buffers at \d+\.\d GB/s"),
    ],
)
def test_what_cannot_be_had_is_refused_or_said(
    device: str, collectives: str, expected: str, tmp_path: Path
) -> None:
    """The stand-in's one device is shared by both ranks, and the probe of MPI fails on it."""
    env = stand_in() | {"XDG_CACHE_HOME": str(tmp_path)}
    job = mpirun(2, ["-c", OPEN, device, collectives], env=env)
    assert re.search(expected, job.stdout), job.stdout + job.stderr


MIXED = """
import sys, cupy
from pdmpi.errors import InputError
from pdmpi.transport.mpi import MPI, MpiTransport
from pdmpi.transport.open import open_cuda_transport
from pdmpi.transport.places import refuse_mixed_places
try:
    if MPI.COMM_WORLD.rank == 0:
        open_cuda_transport(20.0, compute_stream=lambda: 0, ucx="", num_devices=1)
    else:
        refuse_mixed_places(MpiTransport(20.0), has_device=False)
except InputError as error:
    print(error)
"""


@each_mpi
def test_ranks_without_a_device_beside_others_are_refused_on_every_rank(mpi: str) -> None:
    job = mpirun(2, ["-c", MIXED], mpi, env=stand_in())
    expected = r"device = 'auto', but rank 1 on host \S+ sees no CUDA device \(or lacks CuPy\)"
    assert len(re.findall(expected, job.stdout)) == 2, job.stdout + job.stderr
