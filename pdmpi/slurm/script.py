"""The batch script as a pure function of the job: no text of a user's is ever read as a command."""

from __future__ import annotations

import importlib.resources
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from pdmpi.errors import InputError
from pdmpi.slurm.options import JobOptions
from pdmpi.slurm.shape import JobShape

__all__ = ["Job", "directive", "job_script", "launch_command"]

_EARLY = 'for signal in USR1 USR2 TERM; do trap "stopped_early=$signal" $signal; done'
"""Keeps a signal that comes before the run can be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job.

    Attributes
    ----------
    name
        Job's name where the options give none.
    shape
        Ranks and nodes.
    uses_gpus
        Whether the plan's devices are GPUs.
    command
        What every rank runs.
    directory
        Where it runs.
    run_dir
        The run's directory, for its status and its log.
    options
        What the site and the user ask for.
    """

    name: str
    shape: JobShape
    uses_gpus: bool
    command: tuple[str, ...]
    directory: PurePath
    run_dir: PurePath
    options: JobOptions


def job_script(job: Job) -> str:
    """Return the text of the batch script.

    Raises
    ------
    InputError
        A text holds a line break or another control character.
    """
    parts = ["#!/bin/bash", *_directives(job), "", _EARLY, *_environment(job), "", *_body(job), ""]
    return "\n".join(parts)


def directive(option: str, value: object) -> str:
    """Return one ``#SBATCH`` line, quoted as sbatch reads it (backslash escapes inside double quotes)."""
    text = str(value)
    if not text.isprintable():
        raise InputError(f"--{option} {text!r}: must be one line of printable characters")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH --{option}="{escaped}"'


def launch_command(shape: JobShape, options: JobOptions) -> list[str]:
    """Return the launcher and its arguments, up to the command that every rank runs."""
    ranks, per_node = str(shape.num_ranks), str(shape.ranks_per_node)
    heads = {
        "mpirun": ["mpirun", "-n", ranks, "--map-by", f"ppr:{per_node}:node", "--bind-to", "none"],
        "mpiexec": ["mpiexec", "-n", ranks, "-ppn", per_node],
    }
    if options.launcher in heads:
        return [*heads[options.launcher], *options.launcher_args]
    srun = [
        "srun", f"--mpi={options.launcher.removeprefix('srun-')}", f"--ntasks={ranks}",
        f"--ntasks-per-node={per_node}", "--distribution=block", "--kill-on-bad-exit=1",
        f"--cpus-per-task={options.cpus_per_task}",
    ]  # fmt: skip
    # Each rank must see all GPUs of its node: hiding the others breaks CUDA IPC.
    return [*srun, "--gpu-bind=none", *options.launcher_args]


def _directives(job: Job) -> Iterator[str]:
    options, shape = job.options, job.shape
    log = str(job.run_dir / "job.log").replace("%", "%%")
    if "\\" in log:
        raise InputError(
            f"run directory {job.run_dir}: Slurm takes no backslash in a log's path; choose another"
        )
    gpus = options.gpus_per_node
    if gpus is None and job.uses_gpus:
        gpus = -(-shape.ranks_per_node // options.ranks_per_gpu)
    values: dict[str, object | None] = {
        "job-name": options.job_name or job.name,
        "nodes": shape.num_nodes,
        "ntasks": shape.num_ranks,
        "ntasks-per-node": shape.ranks_per_node,
        "cpus-per-task": options.cpus_per_task,
        "gpus-per-node": gpus or None,
        "mem": options.mem,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
        "reservation": options.reservation,
        "exclude": options.exclude,
        "signal": f"B:USR1@{options.signal_before_s}" if options.signal_before_s else None,
        "chdir": job.directory,
        "output": log,
        "open-mode": "append",
    }
    for option, value in values.items():
        if value is not None:
            yield directive(option, value)
    yield "#SBATCH --requeue"


def _environment(job: Job) -> Iterator[str]:
    options = job.options
    for module in options.modules:
        yield f"module load {shlex.quote(module)} || exit 1"
    if options.venv:
        yield f"source {shlex.quote(options.venv + '/bin/activate')} || exit 1"
    for name, value in options.environment.items():
        yield f"export {name}={shlex.quote(value)}"
    yield f"export OMP_NUM_THREADS={options.cpus_per_task}"


def _body(job: Job) -> Iterator[str]:
    command: Sequence[str] = [*launch_command(job.shape, job.options), *job.options.container, *job.command]
    yield f"run_dir={shlex.quote(str(job.run_dir))}"
    yield f"max_restarts={job.options.max_restarts}"
    yield f"max_deaths={job.options.max_deaths}"
    yield f"command=({shlex.join(command)})"
    yield importlib.resources.files("pdmpi.slurm").joinpath("supervise.sh").read_text().rstrip("\n")
