"""``pdmpi sweep``: throughput over numbers of devices and bandwidths."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table

from pdmpi.cli.output import Progress, emit, json_option, table
from pdmpi.errors import InputError
from pdmpi.plan.cluster import Cluster, Device, Level
from pdmpi.plan.cluster_file import load_cluster
from pdmpi.plan.draw import draw_sweep
from pdmpi.plan.hdf5 import check_overwrite
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.plan.store import load_profile
from pdmpi.plan.sweep import Case, Outcome, sweep
from pdmpi.plan.terms import SCHEDULES
from pdmpi.plan.units import human_bytes, parse_bandwidth

__all__ = ["command"]

_FLAT = Cluster(
    name="flat", levels=(Level(name="network", count=1, bandwidth_bytes_per_s=1.0),), devices=(Device(),)
)
_MOST_CASES = 10_000


def _cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _counts(text: str) -> list[int]:
    """Return the numbers of devices of ``"1..64"`` (powers of two and the ends) or ``"4,8,12"``."""
    try:
        if ".." in text:
            low, high = (int(part) for part in text.split(".."))
            found = sorted({low, high} | {1 << i for i in range(21) if low <= 1 << i <= high})
        else:
            found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or max(found) > 1 << 20:
        raise InputError(f"--gpus {text!r} is no range or list of counts; write e.g. 1..64 or 4,8,12")
    return found


def _bandwidths(text: str) -> list[tuple[str, float]]:
    """Return names and bytes per second of ``"1,10,25,100Gbps"``; the last unit holds for all."""
    parts = [part.strip() for part in text.split(",")]
    unit = parts[-1].lstrip("0123456789.eE+ ")
    found = []
    for part in parts:
        name = part if part[-1:].isalpha() else f"{part}{unit}"
        number = name[: len(name) - len(name.lstrip("0123456789.eE+"))]
        rate = parse_bandwidth(f"{number} {name[len(number) :].strip()}")
        if not rate:
            raise InputError(f"--bandwidth {text!r} holds a rate of zero")
        found.append((name, rate))
    return found


@click.command()
@click.argument("profile", type=click.Path(path_type=Path))
@click.option("--gpus", default="1..64", show_default=True, help="A range (powers of two) or a list.")
@click.option("--bandwidth", default="1,10,25,100Gbps", show_default=True, help="Of the outermost links.")
@click.option("--cluster", type=click.Path(path_type=Path),
              help="Cluster file whose nodes are used; without it, one level of links.")  # fmt: skip
@click.option("--schedule", type=click.Choice(list(SCHEDULES)), default="pipedream", show_default=True)
@click.option("--microbatches", type=click.IntRange(1), default=1, show_default=True)
@click.option("--plot", type=click.Path(path_type=Path), help="Picture to write (PNG, SVG, PDF).")
@click.option("--force", is_flag=True, help="Overwrite the picture.")
@click.option("--workers", type=click.IntRange(1), help="Processes; one a core by default.")
@json_option
def command(
    profile: Path, gpus: str, bandwidth: str, cluster: Path | None, schedule: str, microbatches: int,
    plot: Path | None, force: bool, workers: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Tabulate a model's throughput over numbers of devices and bandwidths.

    \b
    Examples:
      pdmpi sweep profile.h5 --gpus 1..64 --bandwidth 1,10,25,100Gbps --plot sweep.png
      pdmpi sweep profile.h5 --cluster configs/clusters/a-4x4.toml --gpus 4,8,16,32
    """
    if plot is not None:
        check_overwrite(plot, force)
    counts, rates = _counts(gpus), _bandwidths(bandwidth)
    cases = [Case(count, rate) for (_, rate), count in itertools.product(rates, counts)]
    if len(cases) > _MOST_CASES:
        raise InputError(f"{len(cases)} cases are more than {_MOST_CASES}; give fewer counts or bandwidths")
    model, base = load_profile(profile), load_cluster(cluster) if cluster else _FLAT
    choice = ScheduleChoice(name=schedule, microbatches=microbatches, recompute="auto")
    cores = workers or min(_cores(), len(cases))
    found: list[Outcome] = []
    with Progress("planning", len(cases)) as progress:
        for outcome in sweep(model, base, choice, cases, cores):
            found.append(outcome)
            progress.update(len(found), f"{outcome.case.devices} devices")
    names = {rate: name for name, rate in rates}
    if plot is not None:
        draw_sweep(plot, found, names)
    emit(_data(found), _table(found, names), as_json)


def _data(found: Sequence[Outcome]) -> dict[str, object]:
    return {
        "cases": [
            {
                "devices": one.case.devices,
                "bandwidth_bytes_per_s": one.case.bandwidth_bytes_per_s,
                "shape": one.shape,
                "samples_per_s": one.samples_per_s,
                "data_parallel_samples_per_s": one.data_parallel_per_s,
                "bytes_per_sample": one.bytes_per_sample,
            }
            for one in found
        ]
    }


def _table(found: Sequence[Outcome], names: dict[float, str]) -> Table:
    rows = [
        (
            names[one.case.bandwidth_bytes_per_s], one.case.devices, one.shape, f"{one.samples_per_s:.4g}",
            f"{one.data_parallel_per_s:.4g}",
            f"{one.samples_per_s / one.data_parallel_per_s:.2f}" if one.data_parallel_per_s else "",
            human_bytes(one.bytes_per_sample),
        )
        for one in found
    ]  # fmt: skip
    columns = (
        "bandwidth", "devices", "replicas", "samples/s", "data parallel", "times", "bytes a sample",
    )  # fmt: skip
    return table("Throughput", columns, rows)
