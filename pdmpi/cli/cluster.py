"""``pdmpi cluster``: measure the machine that a job got, and write its cluster file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click
from rich.table import Table

from pdmpi.cli.output import emit, json_option, table
from pdmpi.errors import InputError
from pdmpi.plan.cluster import Cluster
from pdmpi.plan.cluster_text import cluster_to_text
from pdmpi.plan.hdf5 import check_overwrite
from pdmpi.plan.units import human_bytes, human_seconds

__all__ = ["command"]


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Cluster file to write (TOML).")
@click.option("--force", is_flag=True, help="Overwrite the output.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="What the ranks will compute on, as in [train] device.",
)
@json_option
def command(output: Path | None, force: bool, device: str, as_json: bool) -> None:
    """Measure the links and devices of the ranks that it is started with, and write a cluster file.

    Start it as the training will be started.  A device is the GPU that a rank drives, or else
    one rank's share of the host's cores; its speed is then relative to a core that computes alone,
    as `pdmpi profile` does.

    \b
    Examples:
      mpirun -n 4 pdmpi cluster -o cluster.toml
      srun --mpi=pmix pdmpi cluster --json
      mpirun -n 4 pdmpi cluster --device cpu
    """
    from pdmpi.runtime.agree import from_rank_0
    from pdmpi.runtime.cluster import measured_cluster
    from pdmpi.runtime.place import open_on

    transport, place, notes = open_on(device)

    def check() -> bytes:
        if output is not None:
            check_overwrite(output, force)
        return b""

    from_rank_0(transport, check)
    cluster = measured_cluster(transport, place)
    if transport.rank == 0:
        if output is not None:
            _write(output, cluster)
        data = {**asdict(cluster), "notes": notes}
        emit(data, [_levels(cluster), _devices(cluster, output), *notes], as_json)
    transport.close()


def _write(output: Path, cluster: Cluster) -> None:
    text = cluster_to_text(cluster, f"{cluster.num_devices} ranks, measured by pdmpi cluster")
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror}") from None


def _levels(cluster: Cluster) -> Table:
    rows = [
        (
            level.name,
            level.count,
            f"{human_bytes(level.bandwidth_bytes_per_s)}/s",
            human_seconds(level.latency_s),
            f"{human_bytes(level.bandwidth_bytes_per_s * level.allreduce_efficiency)}/s",
            "yes" if level.shared else "no",
        )
        for level in cluster.levels
    ]
    columns = ["level", "joins", "bandwidth", "latency", "allreduce", "shared"]
    return table(f"Links of {cluster.name}", columns, rows)


def _devices(cluster: Cluster, output: Path | None) -> str:
    device = cluster.device(0)
    written = f"; written to {output}" if output is not None else ""
    speed = f" and {device.relative_speed:.0%} of a core's speed" if device.name == "cpu" else ""
    return (
        f"{cluster.num_devices} devices ({device.name}), {cluster.devices_per_node} a host, each with "
        f"{human_bytes(device.memory_bytes)}{speed}{written}"
    )
