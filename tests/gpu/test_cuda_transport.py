"""`CudaTransport` between real devices, two or a shared one: order, sizes to 1 GiB, dtypes, a killed rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import REPOSITORY, mpirun

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

SCRIPT = REPOSITORY / "tests" / "transport" / "cuda_checks.py"

UCX = {"OMPI_MCA_pml": "ucx"}


def num_devices() -> int:
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


pytestmark = pytest.mark.gpu

NCCL = pytest.mark.skipif(num_devices() < 2, reason="NCCL needs a CUDA device for each rank")


@pytest.mark.parametrize(
    ("way", "reduction"),
    [
        pytest.param("aware", "nccl", marks=NCCL),
        pytest.param("staged", "nccl", marks=NCCL),
        ("aware", "mpi"),
        ("staged", "mpi"),
    ],
)
def test_transport(way: str, reduction: str) -> None:
    job = mpirun(2, [SCRIPT, way, reduction], env=UCX, timeout=200)
    assert job.stdout.count("passed") == 7


def test_the_probe_sends(tmp_path: Path) -> None:
    """What the probe says agrees with what happens in `test_transport` above."""
    code = (
        "import sys; from pathlib import Path\n"
        "from pdmpi.transport.device import load_ucx; ucx = load_ucx()\n"
        "from pdmpi.transport.mpi import library\n"
        "from pdmpi.transport.aware import probe_awareness\n"
        "print(probe_awareness(library(), ucx, Path(sys.argv[1])))"
    )
    job = mpirun(1, ["-c", code, tmp_path], env=UCX)
    assert "Awareness(aware=True" in job.stdout, job.stdout + job.stderr
    assert list(tmp_path.glob("cuda-aware-*.json"))


def test_a_rank_killed_in_the_middle_of_a_transfer_ends_the_job() -> None:
    code = """
import os, signal
from pdmpi.transport.device import choose_device, load_ucx
load_ucx()
import cupy
cupy.cuda.Device(choose_device(os.environ, cupy.cuda.runtime.getDeviceCount(), share=True)).use()
from pdmpi.runtime.watch import Watch
from pdmpi.transport.cuda import CudaTransport
stream = cupy.cuda.Stream(non_blocking=True)
transport = CudaTransport(60.0, compute_stream=lambda: stream.ptr, aware=True)
with Watch(transport, f"stage {transport.rank}, replica 0"):
    buffer = transport.allocate(1 << 28)
    move = transport.bind_send if transport.rank == 0 else transport.bind_recv
    bound = move(buffer, 1 - transport.rank, 0, 0)
    for number in range(1000):
        request = bound.post()
        if number == 20 and transport.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        request.wait()
"""
    job = mpirun(2, ["-c", code], env=UCX, timeout=60, check=False)
    assert job.returncode != 0
    assert "pdmpi: error: rank 1 (stage 1, replica 0, host " in job.stderr
