"""``pdmpi submit``: write and submit the batch job that trains a plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import click

from pdmpi.cli.output import emit, json_option
from pdmpi.config.load import load_config
from pdmpi.errors import InputError
from pdmpi.plan.plan import Plan
from pdmpi.plan.store import load_plan
from pdmpi.slurm.commands import submit, wait
from pdmpi.slurm.options import JobOptions, load_site, merged
from pdmpi.slurm.script import Job, job_script
from pdmpi.slurm.shape import JobShape, assignment, shape_of, shape_problem

__all__ = ["command"]

_SITE_VARIABLE = "PDMPI_SITE"


def _job_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each field of `JobOptions`."""
    for name, field in reversed(JobOptions.model_fields.items()):
        flag = f"--{name.replace('_', '-')}"
        text = (field.description or "").rstrip(".") + "."
        kind = int if int in (field.annotation, *get_args(field.annotation)) else str
        many = isinstance(field.default, tuple) or name == "environment"
        shown = "NAME=VALUE" if name == "environment" else None
        add = click.option(flag, name, type=kind, multiple=many, default=None, help=text, metavar=shown)
        function = add(function)
    return function


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("train_args", nargs=-1, type=click.UNPROCESSED)
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), required=True, help="Plan (HDF5).")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Run's directory; the configuration's else.")
@click.option("--site", type=click.Path(path_type=Path), envvar=_SITE_VARIABLE, show_envvar=True,
              help="Defaults for the options below (TOML); else ~/.config/pdmpi/site.toml.")  # fmt: skip
@click.option("--dependency", help="Start after other jobs, e.g. afterok:123; cancelled if that fails.")
@click.option("--wait", "waits", is_flag=True, help="Wait until the job has ended, requeues included.")
@click.option("--dry-run", is_flag=True, help="Print the script and submit nothing.")
@json_option
@_job_options
def command(
    config: Path, train_args: tuple[str, ...], plan_path: Path, run_dir: Path | None, site: Path | None,
    dependency: str | None, waits: bool, dry_run: bool, as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """Submit the batch job that trains CONFIG as its plan says; it resumes itself when it is requeued.

    Nodes and tasks come from the plan.  What follows ``--`` is passed to ``pdmpi train``.

    \b
    Examples:
      pdmpi submit configs/digits.toml --plan plan.h5 --dry-run
      pdmpi submit configs/digits.toml --plan plan.h5 --partition gpu --time 8:00:00 --wait
      pdmpi submit configs/digits.toml --plan plan.h5 --dependency afterok:123 -- --replan auto
    """
    run_config = load_config(config)
    plan = load_plan(plan_path)
    options = merged(_site_defaults(site), _given(given))
    if options.venv is None and sys.prefix != sys.base_prefix:
        options = options.model_copy(update={"venv": sys.prefix})
    shape = _shape(plan, options)
    if "--replan" not in train_args:
        _check_placement(plan, shape)
    run_dir = (run_dir or Path(run_config.output.run_dir)).absolute()
    files = ["--plan", str(plan_path.absolute()), "--run-dir", str(run_dir)]
    resume = [] if "--resume" in train_args else ["--resume", "auto"]
    job = Job(
        name=config.stem,
        shape=shape,
        uses_gpus=any(not device.name.lower().startswith("cpu") for device in plan.cluster.devices),
        command=("pdmpi", "train", str(config.absolute()), *files, *resume, *train_args),
        directory=Path.cwd(),
        run_dir=run_dir,
        options=options,
    )
    script = job_script(job)
    if dry_run:
        _emit(job.shape, None, run_dir, script, as_json)
        return
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"run directory {run_dir} cannot be made ({error.strerror})") from None
    number = submit(script, os.environ, dependency)
    _emit(job.shape, number, run_dir, script, as_json)
    if waits:
        wait(number, os.environ, notice=lambda line: click.echo(line, err=True))


def _site_defaults(site: Path | None) -> Mapping[str, Any]:
    if site is not None:
        return load_site(site)
    usual = Path("~/.config/pdmpi/site.toml").expanduser()
    return load_site(usual) if usual.is_file() else {}


def _given(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given; repeated ones as tuples, variables as a table."""
    values = {name: value for name, value in given.items() if value not in (None, ())}
    if "environment" in values:
        pairs = [text.partition("=") for text in values["environment"]]
        InputError.collect(f"--environment {a!r}: write NAME=VALUE" for a, equals, _ in pairs if not equals)
        values["environment"] = {name: value for name, _, value in pairs}
    return values


def _shape(plan: Plan, options: JobOptions) -> JobShape:
    return shape_of(plan.nodes, options.nodes)


def _check_placement(plan: Plan, shape: JobShape) -> None:
    """Refuse a job that would refuse its plan, now rather than when it starts."""
    hosts = [f"node {rank // shape.ranks_per_node}" for rank in range(shape.num_ranks)]
    if assignment(plan.nodes, hosts) is None:
        raise InputError(f"--nodes {shape.num_nodes}: {shape_problem(plan.nodes, hosts)}")


def _emit(shape: JobShape, number: str | None, run_dir: Path, script: str, as_json: bool) -> None:
    data = {
        "job": number,
        "num_ranks": shape.num_ranks,
        "num_nodes": shape.num_nodes,
        "ranks_per_node": shape.ranks_per_node,
        "run_dir": run_dir,
        "log": run_dir / "job.log",
        "script": script,
    }
    emit(data, script.rstrip("\n") if number is None else number, as_json)
