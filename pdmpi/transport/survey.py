"""What this machine has for training: found, missing, and what to do about it."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pdmpi.transport.child import ask_child

__all__ = ["Finding", "mpi_finding", "survey", "usable_cores"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes
    ----------
    topic
        What was looked at.
    status
        ``"ok"``, ``"missing"`` (something can be done without it) or ``"problem"``.
    found
        What was found.
    remedy
        What to do; empty when nothing is to be done.
    """

    topic: str
    status: str
    found: str
    remedy: str = ""


def survey() -> Iterator[Finding]:
    """Look at everything that needs neither MPI nor a CUDA context in this process."""
    yield Finding("Python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield _package("torch", "needed to profile and train: pip install 'pdmpi[openmpi]'")
    yield _cores()
    yield from _cuda()
    yield _slurm()
    yield _file_locking()


def mpi_finding(describe: Callable[[], tuple[str, bool]] | None = None) -> Finding:
    """Say which MPI library this Python uses, and whether any thread may call it.

    Parameters
    ----------
    describe
        Returns the library's name and whether it gives ``MPI_THREAD_MULTIPLE``; None asks a
        child process, which may fail or hang where this one must not.
    """
    try:
        version = importlib.metadata.version("mpi4py")
    except importlib.metadata.PackageNotFoundError:
        return Finding("MPI", "missing", "mpi4py is not installed", "pip install 'pdmpi[openmpi]' (or mpich)")
    if describe is None:
        answer = ask_child(
            "import json; from pdmpi.transport.mpi import library, concurrent\n"
            "print(json.dumps([library(), concurrent()]))"
        )
        if isinstance(answer, str):
            remedy = "load the cluster's MPI module, or pip install openmpi (or mpich) beside mpi4py"
            return Finding("MPI", "problem", f"mpi4py {version} finds no working library: {answer}", remedy)
        name, concurrent = answer
    else:
        name, concurrent = describe()
    launcher = _launcher() or "no mpirun on PATH"
    found = f"{name}, mpi4py {version}, {launcher}"
    if concurrent:
        return Finding("MPI", "ok", f"{found}, MPI_THREAD_MULTIPLE")
    remedy = "transfers move only while a rank waits; use a library built with MPI_THREAD_MULTIPLE"
    return Finding("MPI", "problem", f"{found}, without MPI_THREAD_MULTIPLE", remedy)


def _launcher() -> str | None:
    """Return the path of mpirun: beside this Python, as wheels have it, or on PATH."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which("mpirun", path=places) or shutil.which("mpiexec", path=places)


def _package(name: str, remedy: str) -> Finding:
    try:
        return Finding(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", "not installed", remedy)


def usable_cores() -> list[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _cores() -> Finding:
    cores = usable_cores()
    limit = _cpu_quota()
    found = f"{len(cores)} of {os.cpu_count()} cores usable ({_ranges(cores)})"
    found += f", limited to {limit:g} by the control group" if limit is not None else ""
    return Finding("cores", "ok", found)


def _cpu_quota() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _ranges(numbers: list[int]) -> str:
    """Return ``"0-3,8"``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def _cuda() -> Iterator[Finding]:
    if not find_spec("torch") or importlib.metadata.version("torch").endswith("+cpu"):
        yield Finding("CUDA", "missing", "no torch with CUDA", "for GPUs install torch with CUDA")
        return
    code = """
import json, torch
n = torch.cuda.device_count()
print(json.dumps([torch.version.cuda, [torch.cuda.get_device_name(i) for i in range(n)]]))
"""
    answer = ask_child(code)
    if isinstance(answer, str):
        yield Finding("CUDA", "missing", f"unknown: {answer}")
        return
    version, devices = answer
    if version is None:
        yield Finding(
            "CUDA", "missing", "this torch is built without CUDA", "for GPUs install torch with CUDA"
        )
        return
    assert isinstance(devices, list)
    if not devices:
        yield Finding("CUDA", "missing", f"torch has CUDA {version}, but sees no device", "check nvidia-smi")
        return
    yield Finding("CUDA", "ok", f"{version}; {', '.join(map(str, devices))}")
    remedy = f"pip install 'pdmpi[cuda{str(version).partition('.')[0]}]'"
    cupy = ask_child(
        "import json, cupy; from cupy.cuda import nccl\n"
        "print(json.dumps([cupy.__version__, nccl.get_version()]))"
    )
    if isinstance(cupy, str):
        yield Finding("CuPy and NCCL", "problem", cupy, remedy)
    else:
        yield Finding("CuPy and NCCL", "ok", f"CuPy {cupy[0]}, NCCL {cupy[1]}")
    yield from _cuda_environment()


def _cuda_environment() -> Iterator[Finding]:
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:True" in settings or "cudaMallocAsync" in settings:
        remedy = "nothing for pdmpi, which transfers from buffers of its own"
        yield Finding("CUDA allocator", "ok", f"{settings}: its memory cannot be shared by CUDA IPC", remedy)
    if os.environ.get("SLURM_GPUS_PER_TASK"):
        remedy = (
            "ask with --gpus-per-node (and --gpu-bind=none) instead, so that ranks can reach each other's GPU"
        )
        yield Finding("GPU binding", "problem", "--gpus-per-task hides the other GPUs from each rank", remedy)


def _slurm() -> Finding:
    job = os.environ.get("SLURM_JOB_ID")
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        return Finding("Slurm", "missing", "no sbatch on PATH", "only needed to submit batch jobs")
    version = subprocess.run([sbatch, "--version"], capture_output=True, text=True).stdout.strip()
    nodes = f"; job {job} on {os.environ.get('SLURM_JOB_NODELIST', '?')}" if job else "; not inside a job"
    return Finding("Slurm", "ok", f"{version or sbatch}{nodes}")


def _file_locking() -> Finding:
    """HDF5 locks the files that it opens; some parallel file systems cannot."""
    import h5py

    setting = os.environ.get("HDF5_USE_FILE_LOCKING", "unset")
    found = f"h5py {h5py.__version__}, HDF5 {h5py.version.hdf5_version}, HDF5_USE_FILE_LOCKING {setting}"
    try:
        with tempfile.NamedTemporaryFile(dir=".", prefix=".pdmpi-lock-") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if setting.upper() == "FALSE":
                    return Finding("HDF5", "ok", f"{found}; no locks in this directory ({error.strerror})")
                remedy = "export HDF5_USE_FILE_LOCKING=FALSE"
                return Finding("HDF5", "problem", f"{found}; cannot lock here: {error.strerror}", remedy)
    except OSError as error:
        return Finding("HDF5", "ok", f"{found}; this directory is not writable ({error.strerror})")
    return Finding("HDF5", "ok", f"{found}; files in this directory can be locked")
