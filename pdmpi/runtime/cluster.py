"""The cluster that the ranks of a job find themselves on, measured."""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from pdmpi.errors import InputError
from pdmpi.model.timing import torch_threads
from pdmpi.plan.cluster import Cluster, Device, Level
from pdmpi.transport.base import Transport
from pdmpi.transport.links import Link, measure_links

__all__ = ["measured_cluster"]

_ALONE_S, _TOGETHER_S = 0.5, 2.0
_BATCH, _CHANNELS, _WIDTH, _BLOCKS = 32, 16, 16, 4


def measured_cluster(transport: Transport) -> Cluster:
    """Measure hosts, links and cores, on all ranks together; the same on every rank.

    Links inside a host are measured between its first two ranks, links between hosts
    between their first ranks.  A device's ``relative_speed`` is what is left of a core's speed when all
    ranks compute at once: one half, say, for four ranks on two cores.

    Raises
    ------
    InputError
        For one rank, for hosts with different numbers of ranks, and for ranks that are not
        numbered host by host.
    """
    hosts = [part.decode() for part in _share(transport, socket.gethostname().encode())]
    per_host = _ranks_per_host(hosts)
    num_hosts = len(hosts) // per_host
    levels = []
    if per_host > 1:
        inside = measure_links(transport, [(0, 1)])
        levels.append(_level("shared-memory", per_host, inside))
    if num_hosts > 1:
        firsts = [(host * per_host, (host + 1) * per_host) for host in range(num_hosts - 1)]
        levels.append(_level("network", num_hosts, measure_links(transport, firsts), shared=per_host > 1))
    speeds = [float(part) for part in _share(transport, repr(_relative_speed(transport)).encode())]
    memory = min(int(part) for part in _share(transport, str(_memory_bytes() // per_host).encode()))
    device = Device(name="cpu", memory_bytes=memory, relative_speed=round(min(1.0, *speeds), 3))
    return Cluster(
        name=hosts[0], levels=tuple(levels), devices=(device,), devices_per_node=per_host,
    )  # fmt: skip


def _ranks_per_host(hosts: Sequence[str]) -> int:
    if len(hosts) == 1:
        raise InputError(
            "one rank has no links to measure; start as many as the plan will have: mpirun -n 4 ..."
        )
    counts = {host: hosts.count(host) for host in hosts}
    per_host = counts[hosts[0]]
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{host}: {count}" for host, count in counts.items())
        raise InputError(f"hosts run different numbers of ranks ({shown}); give each the same number")
    if any(len(set(hosts[i : i + per_host])) > 1 for i in range(0, len(hosts), per_host)):
        raise InputError("ranks are not numbered host by host; map them by slot (mpirun --map-by slot)")
    return per_host


def _level(name: str, count: int, links: Sequence[Link], shared: bool = False) -> Level:
    """Return the level of the slowest of these links."""
    return Level(
        name=name,
        count=count,
        bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s for link in links),
        latency_s=max(link.latency_s for link in links),
        shared=shared,
    )


def _relative_speed(transport: Transport) -> float:
    """Return this rank's steps a second while all compute, over the first rank's speed alone.

    Alone the median step counts, as in a profile; together every second counts, those too in
    which the host gave the time to others.
    """
    with torch_threads(1):
        step = _training_step()
        alone = statistics.median(_seconds(step, _ALONE_S)) if transport.rank == 0 else 0.0
        alone = float(_share(transport, repr(alone).encode())[0])
        transport.barrier()
        return alone / statistics.fmean(_seconds(step, _TOGETHER_S))


def _training_step() -> Callable[[], None]:
    """Return a step of a small convolutional net, whose activations outgrow a core's own cache.

    Training ranks slow each other in the caches and the memory that they share, which a
    kernel that stays in registers would not show.
    """
    layers = [
        layer
        for _ in range(_BLOCKS)
        for layer in (
            nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1), nn.BatchNorm2d(_CHANNELS), nn.ReLU(),
        )
    ]  # fmt: skip
    model = nn.Sequential(*layers)
    source = torch.ones(_BATCH, _CHANNELS, _WIDTH, _WIDTH)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(source).sum().backward()

    step()
    return step


def _seconds(step: Callable[[], None], budget_s: float) -> list[float]:
    """Return what each step took, over and over until the budget is spent."""
    found: list[float] = []
    began = ended = time.perf_counter()
    while ended - began < budget_s:
        started = ended
        step()
        ended = time.perf_counter()
        found.append(ended - started)
    return found


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _share(transport: Transport, data: bytes) -> list[bytes]:
    """Return every rank's bytes, by rank, on every rank."""
    parts = transport.gather(data)
    text = transport.broadcast(json.dumps([part.decode() for part in parts]).encode())
    return [part.encode() for part in json.loads(text)]
