"""Questions that may crash or hang whoever asks, so a process of its own asks them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

__all__ = ["ask_child"]

_TIMEOUT_S = 60.0
_LAUNCHER = ("OMPI_", "PMI", "PRTE_", "PMIX_", "HYDRA_", "MPI_LOCAL", "SLURM_")
_KEPT = ("OMPI_MCA_", "OMPI_ALLOW", "PMIX_MCA_", "PRTE_MCA_")


def ask_child(code: str, timeout_s: float = _TIMEOUT_S) -> list[object] | str:
    """Run Python code in a process of its own, outside the MPI job that this one may be in.

    Returns
    -------
    list or str
        The JSON list that it printed last, or what went wrong.
    """
    environ = {n: v for n, v in os.environ.items() if not n.startswith(_LAUNCHER) or n.startswith(_KEPT)}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        job = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return f"nothing within {timeout_s:g} s"
    lines = job.stdout.strip().splitlines()
    if job.returncode == 0 and lines:
        answer: list[object] = json.loads(lines[-1])
        return answer
    if job.returncode < 0:
        return f"killed by signal {-job.returncode}"
    errors = job.stderr.strip().splitlines()
    return errors[-1] if errors else f"exit code {job.returncode}"
