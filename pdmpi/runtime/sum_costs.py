"""What a sum over ranks takes: of their links, and of what computes beside it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from pdmpi.model.timing import Clock
from pdmpi.runtime.capture import CudaCapturer
from pdmpi.runtime.slots import device_memory, host_memory
from pdmpi.simulate.costs import BUCKET_BYTES, DEVICE_BUCKET_BYTES
from pdmpi.transport.base import Bound, Transport
from pdmpi.transport.share import share

__all__ = ["SUM_BYTES", "measure_sum", "sent_bytes", "sum_rate"]

SUM_BYTES, _SUMS = 32 << 20, 5
"""Size and number of the sums that tell what an allreduce makes of a link, in buckets as in training."""
_PRODUCTS, _SUMMED_S, _TRIES = 300, 0.1, 3
"""What a GPU computes beside sums, how long those may take, and how often that is tried."""


def sent_bytes(num_ranks: int) -> float:
    """Return the bytes that a rank sends in a ring allreduce of `SUM_BYTES`, whatever the library does.

    nccl-tests call these bytes a second the bus bandwidth.
    """
    return 2 * (num_ranks - 1) / num_ranks * SUM_BYTES


def sum_rate(sum_s: float, num_ranks: int, latency_s: float) -> float:
    """Return the bytes a second that each rank sends while `SUM_BYTES` are summed.

    The latencies of its 2 (m - 1) steps over m ranks, which are priced beside the rate, are taken off the
    time, up to half of it.
    """
    steps = 2 * (num_ranks - 1)
    return sent_bytes(num_ranks) / max(sum_s - steps * latency_s, sum_s / 2)


def measure_sum(transport: Transport, groups: list[list[int]], device: torch.device) -> tuple[float, float]:
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

    buckets = [bucket() for _ in range(SUM_BYTES // size)]

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
        slowest = max(share(transport, statistics.median(seconds)))
        count = max(1, min(_SUMS, int(_SUMMED_S / slowest)))
        more = [bucket() for _ in range((count - 1) * len(buckets))]
        worked = _slowed(transport, [*buckets, *more], count, slowest)
    found = share(transport, [statistics.median(seconds), statistics.median(worked)])
    return max(part[0] for part in found), max(part[1] for part in found)


def _slowed(
    transport: Transport, buckets: Sequence[tuple[Tensor, Bound]], count: int, sum_s: float
) -> list[float]:
    """Return the seconds, of several tries, that a GPU computes longer for a sum beside it.

    What it computes are products of matrices as in a small transformer, for twice as long as the sums take:
    so many, of so many seconds each.  Their buckets are filled in between, as gradients fill them.
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
        loads = 1 + math.ceil(2 * count * sum_s / seconds(1))
        alone = statistics.median(seconds(loads) for _ in range(_TRIES))
        beside = [seconds(loads, buckets) for _ in range(_TRIES + 1)]
    return [max(found - alone, 0.0) / count for found in beside[1:]]
