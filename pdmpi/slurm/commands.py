"""The few commands of Slurm that are called: submit, wait, when does it end."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from pdmpi.errors import InputError, PdmpiError
from pdmpi.slurm.environment import JobEnvironment, cleaned, parse_end_time

__all__ = ["JobFailed", "end_time", "submit", "wait"]

_DEPENDENCY = re.compile(
    r"(after|afterany|afterok|afternotok|aftercorr):\d+([+]\d+)?(:\d+([+]\d+)?)*|singleton"
)
_OVER = {
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE",
}  # fmt: skip
_TIMEOUT_S = 60.0
_REQUEUE_S = 30.0


class JobFailed(PdmpiError):
    """A job that was waited for did not end well."""


def submit(script: str, environ: Mapping[str, str], dependency: str | None = None) -> str:
    """Submit a batch script and return the job's id.

    Parameters
    ----------
    script
        Text of the script.
    environ
        The submitting process's environment; what describes a job that it runs in is left out.
    dependency
        As for sbatch: ``"afterok:12"``; a job whose dependency can never be met is cancelled.

    Raises
    ------
    InputError
        The dependency is no dependency, there is no Slurm, or Slurm refuses the job.
    """
    command = ["sbatch", "--parsable"]
    if dependency is not None:
        if not all(_DEPENDENCY.fullmatch(part) for part in re.split("[,?]", dependency)):
            raise InputError(
                f"--dependency {dependency!r}: must be like afterok:12, afterany:12:13 or singleton"
            )
        command += [f"--dependency={dependency}", "--kill-on-invalid-dep=yes"]
    return _run(command, environ, script).strip().partition(";")[0]


def end_time(job: JobEnvironment, environ: Mapping[str, str]) -> float | None:
    """Return when the time limit ends the job (Unix seconds); None without a job or a limit."""
    if not job.job or job.end_unix_s is not None:
        return job.end_unix_s
    try:
        return parse_end_time(_run(["squeue", "-h", "-j", job.job, "-o", "%e"], environ))
    except InputError:
        return None


def wait(
    job: str, environ: Mapping[str, str], notice: Callable[[str], None] = lambda _: None, poll_s: float = 5.0
) -> None:
    """Wait until a job has ended for good, requeues included.

    Raises
    ------
    JobFailed
        It ended otherwise than by success; the message says how.
    """
    last, stopped_s = "", time.monotonic()
    while True:
        shown = _run(["scontrol", "show", "job", "-o", job], environ)
        fields = dict(part.partition("=")[::2] for part in shown.split())
        state, code = fields.get("JobState", ""), fields.get("ExitCode", "")
        if state != last:
            notice(f"job {job}: {state.lower()} ({fields.get('NodeList', '')})")
            last, stopped_s = state, time.monotonic()
        # Slurm may show a job that is about to be requeued as failed for a moment.
        requeues = code.startswith("75:") and time.monotonic() - stopped_s < _REQUEUE_S
        if state == "COMPLETED":
            return
        if state in _OVER and not requeues:
            raise JobFailed(f"job {job} ended: {state}, exit code {code}; see its log")
        time.sleep(poll_s)


def _run(command: Sequence[str], environ: Mapping[str, str], text: str = "") -> str:
    environment = {**cleaned(environ), "SLURM_TIME_FORMAT": "standard"}
    try:
        done = subprocess.run(
            command,
            input=text,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise InputError(f"{command[0]} is not on PATH: run this where Slurm is, or give --dry-run") from None
    except subprocess.TimeoutExpired:
        raise InputError(f"{command[0]} does not answer within {_TIMEOUT_S:.0f} s; ask the site") from None
    if done.returncode:
        said = " ".join(done.stderr.split()).removeprefix(f"{command[0]}: ")
        raise InputError(f"{command[0]}: {said}")
    return done.stdout
