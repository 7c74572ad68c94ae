"""What a batch job knows of itself, and what a job must not inherit from another."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

__all__ = ["JobEnvironment", "cleaned", "parse_end_time"]

_INHERITED = re.compile(
    r"(SLURM_|SLURMD_|PMI_|PMI2_|PMIX_|PRTE_(?!MCA_)|OMPI_(COMM_WORLD|APP|FILE|FIRST|NUM_APP|UNIVERSE|ARGV|COMMAND)"
    r"|MPI_LOCAL|HYDI_)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnvironment:
    """The batch job that this process belongs to.

    Attributes
    ----------
    job
        Its id; empty outside of a job.
    restarts
        Times that it has been requeued.
    end_unix_s
        When its time limit ends it, if the environment tells (Slurm 23.02 and later).
    num_nodes
        Nodes of the allocation.
    """

    job: str = ""
    restarts: int = 0
    end_unix_s: float | None = None
    num_nodes: int | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> JobEnvironment:
        """Read the variables that Slurm sets; what is no number counts as not set."""
        numbers = {name: int(text) for name, text in environ.items() if text.isascii() and text.isdecimal()}
        return cls(
            job=environ.get("SLURM_JOB_ID", ""),
            restarts=numbers.get("SLURM_RESTART_COUNT", 0),
            end_unix_s=numbers.get("SLURM_JOB_END_TIME"),
            num_nodes=numbers.get("SLURM_JOB_NUM_NODES"),
        )


def parse_end_time(text: str) -> float | None:
    """Read what ``squeue -o %e`` prints: a local time, or a word when there is no limit."""
    try:
        return datetime.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S").astimezone().timestamp()
    except ValueError:
        return None


def cleaned(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what describes the present job and rank.

    A job that is submitted from inside another would take the other's node count and
    ranks for its own.  ``SLURM_CONF`` says which cluster this is, and stays; so do
    settings that a user makes (``SBATCH_*``, ``OMPI_MCA_*``, ``PRTE_MCA_*``).
    """
    kept = {name: value for name, value in environ.items() if not _INHERITED.match(name)}
    if "SLURM_CONF" in environ:
        kept["SLURM_CONF"] = environ["SLURM_CONF"]
    return kept
