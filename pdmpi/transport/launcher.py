"""What the launcher's environment says, before and beside MPI."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from pdmpi.errors import InputError

__all__ = ["check_world_size", "launched_size", "local_rank", "local_size", "set_library_defaults"]

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")
"""Processes that were started together.  Slurm's comes last: under mpirun it counts daemons."""

_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")


_LIBRARY_DEFAULTS = {
    # Otherwise Open MPI lets large messages that cross on a TCP link wait for each other: half of its rate.
    "OMPI_MCA_btl_tcp_flags": "send",
    # Otherwise Open MPI's sums that run beside computation, and in place, go up a tree and down again.
    "OMPI_MCA_coll_libnbc_iallreduce_algorithm": "ring",
}
"""Settings of MPI libraries that a pipeline wants, for those who set none themselves."""


def set_library_defaults(environ: MutableMapping[str, str]) -> None:
    """Set what a pipeline wants of MPI libraries, before one starts; a user's own setting stays."""
    for name, value in _LIBRARY_DEFAULTS.items():
        environ.setdefault(name, value)


def _first(names: tuple[str, ...], environ: Mapping[str, str]) -> tuple[str, int] | None:
    for name in names:
        if environ.get(name, "").isdecimal():
            return name, int(environ[name])
    return None


def launched_size(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the variable that tells how many processes were started, and that number."""
    return _first(_SIZES, environ)


def local_rank(environ: Mapping[str, str]) -> int | None:
    """Return this process's number among those of its host, if the launcher tells."""
    found = _first(_LOCAL_RANKS, environ)
    return found[1] if found else None


def local_size(environ: Mapping[str, str]) -> int | None:
    """Return how many processes were started on this host, if the launcher tells."""
    found = _first(_LOCAL_SIZES, environ)
    return found[1] if found else None


def check_world_size(size: int, library: str, environ: Mapping[str, str]) -> None:
    """Refuse to run as one of several processes that each believe they are alone.

    Raises
    ------
    InputError
        If MPI sees one process, and the launcher started more.
    """
    found = launched_size(environ)
    if size != 1 or found is None or found[1] <= 1:
        return
    name, launched = found
    raise InputError(
        f"the launcher started {launched} processes ({name}={launched}), but MPI sees one in each: this "
        f"Python uses {library}, which does not know that launcher; start with that library's own mpirun, or "
        "srun --mpi=pmix (Open MPI) or srun --mpi=pmi2 (MPICH)"
    )
