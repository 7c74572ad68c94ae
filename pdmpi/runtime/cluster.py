"""The cluster that the ranks of a job find themselves on, measured."""

from __future__ import annotations

import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from torch import Tensor, nn

from pdmpi.errors import InputError
from pdmpi.model.timing import Clock, torch_threads
from pdmpi.plan.cluster import Cluster, Device, Level
from pdmpi.runtime.capture import CudaCapturer
from pdmpi.runtime.slots import device_memory, host_memory
from pdmpi.simulate.costs import BUCKET_BYTES, DEVICE_BUCKET_BYTES
from pdmpi.transport.base import Bound, Transport
from pdmpi.transport.links import Link, measure_links
from pdmpi.transport.share import share

__all__ = ["measured_cluster"]

_SUM_BYTES, _SUMS = 32 << 20, 5
"""Size and number of the sums that tell what an allreduce makes of a link, in buckets as in training."""
_PRODUCTS = 300
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
        summed = _summed(transport, hosts_ranks, device)
        levels.append(_level(name, per_host, inside, summed, per_host, _latency_s(inside)))
    if num_hosts > 1:
        firsts = [(host * per_host, (host + 1) * per_host) for host in range(num_hosts - 1)]
        between = measure_links(transport, firsts, memory, transport.allocate)
        latency_s = max([_latency_s(between), *(level.latency_s for level in levels)])
        everyone = [list(range(len(hosts)))]
        summed = _summed(transport, everyone, device)
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


def _sent_bytes(num_ranks: int) -> float:
    """Return the bytes that a rank sends in a ring allreduce of `_SUM_BYTES`, whatever the library does.

    nccl-tests call these bytes a second the bus bandwidth.
    """
    return 2 * (num_ranks - 1) / num_ranks * _SUM_BYTES


def _sum_rate(sum_s: float, num_ranks: int, latency_s: float) -> float:
    """Return the bytes a second that each rank sends while `_SUM_BYTES` are summed.

    The latencies of its 2 (m - 1) steps over m ranks, which are priced beside the rate, are taken off the
    time, up to half of it.
    """
    steps = 2 * (num_ranks - 1)
    return _sent_bytes(num_ranks) / max(sum_s - steps * latency_s, sum_s / 2)


def _summed(transport: Transport, groups: list[list[int]], device: torch.device) -> tuple[float, float]:
    """Sum over groups, all at once, as training does.

    Returns
    -------
    seconds, worked
        Medians, on the slowest rank: of one sum by itself, and what it takes of the processor, or of the
        GPU, that computes beside it.
    """
    transport.prepare(groups, ["float32"])
    ranks = next(group for group in groups if transport.rank in group)
    on_cuda = device.type == "cuda"
    size = DEVICE_BUCKET_BYTES if transport.sums_on_device else BUCKET_BYTES
    allocate = device_memory(transport) if on_cuda else host_memory

    def bucket() -> tuple[Tensor, Bound]:
        memory, buffer = allocate(size)
        return memory, transport.bind_allreduce(buffer, "float32", ranks)

    buckets = [bucket() for _ in range(_SUM_BYTES // size)]

    def once() -> None:
        for request in [bound.post() for _, bound in buckets]:
            request.wait()
        if on_cuda:
            torch.cuda.synchronize(device)

    once()
    seconds, worked = [], []
    for _ in range(_SUMS):
        transport.barrier()
        began, began_work = time.perf_counter(), time.process_time()
        once()
        seconds.append(time.perf_counter() - began)
        worked.append(time.process_time() - began_work)
    if on_cuda:
        more = [bucket() for _ in range((_SUMS - 1) * len(buckets))]
        worked = _slowed(transport, [*buckets, *more], statistics.median(seconds))
    found = share(transport, [statistics.median(seconds), statistics.median(worked)])
    return max(part[0] for part in found), max(part[1] for part in found)


def _slowed(transport: Transport, buckets: Sequence[tuple[Tensor, Bound]], sum_s: float) -> list[float]:
    """Return the seconds, of several tries, that a GPU computes longer for a sum beside it.

    What it computes are products of matrices as in a small transformer, for twice as long as `_SUMS` sums
    take.  Their buckets are filled in between, as gradients fill them.
    """
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        a, b = (torch.ones(1024, n, device="cuda", dtype=torch.bfloat16) for n in (1024, 4096))
        product = a @ b
        gradients = torch.zeros_like(buckets[0][0])
        clock, capturer = Clock(gradients.device), CudaCapturer()

        def multiply() -> None:
            for _ in range(_PRODUCTS):
                torch.mm(a, b, out=product)

        capturer.settle()
        load = capturer.capture(capturer.scratch, multiply)

        def seconds(loads: int, summed: Sequence[tuple[Tensor, Bound]] = ()) -> float:
            transport.barrier()
            load.replay()  # while the host posts
            start, requests = clock.mark(), []
            for memory, bound in summed:
                memory.copy_(gradients)
                requests.append(bound.post())
            for _ in range(loads):
                load.replay()
            end = clock.mark()
            for request in requests:
                request.wait()
            clock.finish()
            return clock.between(start, end)

        seconds(1)
        loads = 1 + math.ceil(2 * _SUMS * sum_s / seconds(1))
        alone = statistics.median(seconds(loads) for _ in range(_SUMS))
        beside = [seconds(loads, buckets) for _ in range(_SUMS + 1)]
    return [max(found - alone, 0.0) / _SUMS for found in beside[1:]]


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
        allreduce_efficiency=float(f"{_sum_rate(sum_s, num_ranks, latency_s) / bandwidth:.3g}"),
        allreduce_work_s_per_byte=float(f"{work_s / _sent_bytes(num_ranks):.3g}"),
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
