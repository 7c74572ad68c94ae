"""``pdmpi doctor``: what this machine has, what is missing, what to do about it."""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from rich.console import RenderableType

from pdmpi.cli.output import emit, json_option, table
from pdmpi.plan.units import human_seconds
from pdmpi.transport.base import Transport
from pdmpi.transport.device import choose_device, load_ucx
from pdmpi.transport.launcher import launched_size, local_rank
from pdmpi.transport.links import Link, link_pairs, measure_links
from pdmpi.transport.survey import Finding, mpi_finding, survey, usable_cores

__all__ = ["command"]

_STALL_TIMEOUT_S = 60.0


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Say what this machine has, what is missing and what to do about it.

    Under mpirun every host is looked at, and the links between ranks are measured.

    \b
    Examples:
      pdmpi doctor
      mpirun -n 2 pdmpi doctor
      pdmpi doctor --json
    """
    if launched_size(os.environ) is None:
        findings = [mpi_finding(), *survey()]
        emit({"findings": findings}, _findings_table(findings), as_json)
    else:
        _examine_job(as_json)


def _examine_job(as_json: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="pdmpi-ucx-") as logs:
        os.environ.setdefault("UCX_LOG_LEVEL", "info")
        os.environ.setdefault("UCX_LOG_FILE", f"{logs}/ucx.%p.log")
        transport, links, notes = _measure()
        carriers = sorted(
            {name for log in Path(logs).glob("ucx.*.log") for name in _carriers(log.read_text())}
        )
    from pdmpi.transport import mpi

    findings = []
    if not local_rank(os.environ):  # one a host
        findings = [mpi_finding(lambda: (mpi.library(), mpi.concurrent())), *survey()]
        findings += [Finding("UCX", "ok", ", ".join(carriers))] if carriers else []
    ranks = _gather_ranks(transport, findings)
    if transport.rank == 0:
        _report(ranks, links, notes, as_json)
    transport.close()


def _measure() -> tuple[Transport, list[Link], list[str]]:
    """Open the transport that training would use, and measure its links."""
    num_devices = _num_devices()
    if not num_devices:
        from pdmpi.transport.mpi import MpiTransport

        transport: Transport = MpiTransport(_STALL_TIMEOUT_S)
        return transport, measure_links(transport, link_pairs(transport.size)), []
    import torch

    torch.cuda.set_device(choose_device(os.environ, num_devices, share=True))
    ucx = load_ucx()
    from pdmpi.transport.open import measure_device_links, open_cuda_transport

    on_devices, notes = open_cuda_transport(
        _STALL_TIMEOUT_S,
        compute_stream=lambda: torch.cuda.current_stream().cuda_stream,
        ucx=ucx,
        num_devices=num_devices,
    )
    links = measure_links(on_devices, link_pairs(on_devices.size)) + measure_device_links(on_devices)
    return on_devices, links, notes


def _num_devices() -> int:
    """Return how many CUDA devices can be used, without making a context."""
    if not (find_spec("cupy") and find_spec("torch")):
        return 0
    import torch

    return torch.cuda.device_count()


def _carriers(log: str) -> set[str]:
    """Return what UCX says that it sends tagged messages by: ``"cuda_ipc/cuda"``."""
    return {part for found in re.findall(r"tag\(([^)]+)\)", log) for part in found.split()}


def _report(
    ranks: Sequence[dict[str, Any]], links: Sequence[Link], notes: Sequence[str], as_json: bool
) -> None:
    found = {rank["host"]: [Finding(**finding) for finding in rank["findings"]] for rank in reversed(ranks)}
    hosts = {host: findings for host, findings in reversed(found.items()) if findings}
    problems = [*_shared_cores(ranks), *notes]
    data = {
        "ranks": [{key: rank[key] for key in ("rank", "host", "pid", "cores")} for rank in ranks],
        "hosts": [{"host": host, "findings": findings} for host, findings in hosts.items()],
        "problems": problems,
        "links": links,
    }
    rows = [(rank["rank"], rank["host"], rank["pid"], len(rank["cores"])) for rank in ranks]
    shown = [_findings_table(findings, host) for host, findings in hosts.items()]
    shown += [table("ranks", ("rank", "host", "pid", "cores"), rows), *problems, _links_table(links)]
    emit(data, shown, as_json)


def _gather_ranks(transport: Transport, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return on rank 0 what every rank found."""
    mine = {
        "rank": transport.rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cores": usable_cores(),
        "findings": [asdict(finding) for finding in findings],
    }
    return [json.loads(part) for part in transport.gather(json.dumps(mine).encode())]


def _shared_cores(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Say which hosts have fewer cores than ranks that compute on them."""
    problems = []
    for host in sorted({rank["host"] for rank in ranks}):
        here = [rank for rank in ranks if rank["host"] == host]
        cores = {core for rank in here for core in rank["cores"]}
        if len(cores) < len(here):
            problems.append(
                f"host {host}: {len(here)} ranks are bound to {len(cores)} cores and take turns; "
                "use fewer ranks, or --bind-to none if there are more cores"
            )
    return problems


def _findings_table(findings: Sequence[Finding], host: str = "") -> RenderableType:
    marks = {"ok": "ok", "missing": "missing", "problem": "PROBLEM"}
    rows = [(f.topic, marks[f.status], f.found, f.remedy) for f in findings]
    return table(host or socket.gethostname(), ("what", "status", "found", "what to do"), rows)


def _links_table(links: Sequence[Link]) -> RenderableType:
    rows = [
        (f"{link.source} - {link.target}", link.memory, human_seconds(link.latency_s),
         f"{link.bandwidth_bytes_per_s / 1e9:.2f} GB/s")
        for link in links
    ]  # fmt: skip
    return table("links, one way", ("ranks", "memory", "latency (8 B)", "bandwidth (8 MiB)"), rows)
