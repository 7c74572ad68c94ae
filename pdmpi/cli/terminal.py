"""Whether a person looks at what a process prints, which under a launcher the process cannot see.

Open MPI gives its ranks a pseudo-terminal or a pipe whatever it writes to itself, so the
launcher's own streams are looked at: a bar and colours are for a terminal, not for a batch job's log.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["is_terminal"]

_LAUNCHERS = (
    "mpirun", "mpiexec", "prterun", "prted", "orterun", "orted", "hydra_pmi_proxy", "mpiexec.hydra",
    "hydra_bstrap_pr", "srun", "slurmstepd",
)  # fmt: skip
"""Processes that start ranks, as Linux names them."""

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def is_terminal(descriptor: int) -> bool:
    """Return whether stdout (1) or stderr (2) ends in a terminal.

    A rank on the launcher's own host finds out from the launcher; elsewhere the answer is no.
    """
    if any(name in os.environ for name in _RANKS):
        outermost = _outermost_launcher(os.getppid())
        return outermost is not None and _points_to_terminal(outermost, descriptor)
    stream = sys.stdout if descriptor == 1 else sys.stderr
    return stream.isatty()


def _outermost_launcher(pid: int) -> int | None:
    """Return the launcher among this process's ancestors that was started first."""
    found = None
    while pid > 1:
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            return found
        if name in _LAUNCHERS:
            found = pid
        elif found is not None:
            return found
        pid = int(rest.split()[1])
    return found


def _points_to_terminal(pid: int, descriptor: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False
