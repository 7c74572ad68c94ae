"""The cluster that the ranks of a job find themselves on, measured."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from torch import nn

from pdmpi.errors import InputError
from pdmpi.model.timing import torch_threads
from pdmpi.plan.cluster import Cluster, Device, Level
from pdmpi.runtime.sum_costs import measure_sum, sent_bytes, sum_rate
from pdmpi.transport.base import Transport
from pdmpi.transport.links import Link, measure_links
from pdmpi.transport.share import share

__all__ = ["measured_cluster"]

_CPU = torch.device("cpu")

_ALONE_S, _TOGETHER_S, _WINDOWS = 0.5, 2.0, 5
_BATCH, _CHANNELS, _WIDTH, _BLOCKS = 32, 16, 16, 4


def measured_cluster(transport: Transport, device: torch.device = _CPU) -> Cluster:
    """Measure hosts, links and devices, on all ranks together; the same on every rank.

    Links inside a host are measured between its first two ranks, links between hosts
    between their first ranks, from one device's memory to the other's; sums over the ranks of each
    host, and over all ranks, tell what an allreduce makes of them, and what it takes of what computes.
    The ``relative_speed`` of a core is
    what is left of its speed when all ranks compute at once: one half, say, for four ranks on two
    cores.  A GPU is a rank's own, and its speed is one.

    Parameters
    ----------
    transport
        Of this rank.
    device
        Where the rank computes.

    Raises
    ------
    InputError
        For one rank, for hosts with different numbers of ranks, and for ranks that are not
        numbered host by host.
    """
    hosts = share(transport, socket.gethostname())
    per_host = _ranks_per_host(hosts)
    num_hosts = len(hosts) // per_host
    levels, memory = [], "host" if device.type == "cpu" else "cuda"
    if per_host > 1:
        inside = measure_links(transport, [(0, 1)], memory, transport.allocate)
        hosts_ranks = [list(range(first, first + per_host)) for first in range(0, len(hosts), per_host)]
        name = "shared-memory" if device.type == "cpu" else "gpu-links"
        summed = measure_sum(transport, hosts_ranks, device)
        levels.append(_level(name, per_host, inside, summed, per_host, _latency_s(inside)))
    if num_hosts > 1:
        firsts = [(host * per_host, (host + 1) * per_host) for host in range(num_hosts - 1)]
        between = measure_links(transport, firsts, memory, transport.allocate)
        latency_s = max([_latency_s(between), *(level.latency_s for level in levels)])
        everyone = [list(range(len(hosts)))]
        summed = measure_sum(transport, everyone, device)
        shared = per_host > 1
        levels.append(_level("network", num_hosts, between, summed, len(hosts), latency_s, shared=shared))
    found = _card(device) if device.type == "cuda" else _share_of_host(transport, per_host)
    parts = share(transport, asdict(found))
    names = sorted({part["name"] for part in parts})
    if len(names) > 1:
        raise InputError(
            f"ranks drive different devices ({', '.join(names)}); write the cluster file by hand"
        )
    slowest = min(part["relative_speed"] for part in parts)
    least = min(part["memory_bytes"] for part in parts)
    return Cluster(
        name=hosts[0],
        levels=tuple(levels),
        devices=(Device(name=names[0], memory_bytes=least, relative_speed=round(slowest, 3)),),
        devices_per_node=per_host,
    )


def _card(device: torch.device) -> Device:
    """Return the GPU that this rank drives."""
    found = torch.cuda.get_device_properties(device)
    return Device(name=found.name, memory_bytes=found.total_memory)


def _share_of_host(transport: Transport, per_host: int) -> Device:
    """Return this rank's part of its host's cores and memory."""
    speed = min(1.0, _relative_speed(transport))
    return Device(name="cpu", memory_bytes=_memory_bytes() // per_host, relative_speed=speed)


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


def _level(
    name: str,
    count: int,
    links: Sequence[Link],
    summed: tuple[float, float],
    num_ranks: int,
    latency_s: float,
    *,
    shared: bool = False,
) -> Level:
    """Return the level of the slowest of these links, on which so many ranks' sums took that long."""
    bandwidth = min(link.bandwidth_bytes_per_s for link in links)
    sum_s, work_s = summed
    return Level(
        name=name,
        count=count,
        bandwidth_bytes_per_s=bandwidth,
        latency_s=_latency_s(links),
        shared=shared,
        allreduce_efficiency=float(f"{sum_rate(sum_s, num_ranks, latency_s) / bandwidth:.3g}"),
        allreduce_work_s_per_byte=float(f"{work_s / sent_bytes(num_ranks):.3g}"),
    )


def _latency_s(links: Sequence[Link]) -> float:
    return max(link.latency_s for link in links)


def _relative_speed(transport: Transport) -> float:
    """Return this rank's steps a second while all compute, over the first rank's speed alone.

    Alone the median step counts, as in a profile; together every second of a window counts, those too in
    which the host gave the time to others, and of the windows the median, which one disturbance leaves alone.
    """
    with torch_threads(1):
        step = _training_step()
        alone = statistics.median(_seconds(step, _ALONE_S)) if transport.rank == 0 else 0.0
        alone = float(share(transport, alone)[0])
        transport.barrier()
        windows = [statistics.fmean(_seconds(step, _TOGETHER_S / _WINDOWS)) for _ in range(_WINDOWS)]
        return alone / statistics.median(windows)


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
