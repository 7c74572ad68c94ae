"""Run by two ranks, on GPUs or over the stand-in for CuPy: checks of `CudaTransport`.

Arguments: ``aware`` or ``staged``, and ``nccl`` or ``mpi``.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from job_checks import run_checks

from pdmpi.transport.device import choose_device, load_ucx

load_ucx()

import os  # noqa: E402

import cupy  # noqa: E402
import numpy as np  # noqa: E402

ON_GPU = not hasattr(cupy.cuda.Stream, "enqueue")  # the stand-in's streams have it

if ON_GPU:
    cupy.cuda.Device(choose_device(os.environ, cupy.cuda.runtime.getDeviceCount(), share=True)).use()

from pdmpi.transport.cuda import CudaTransport  # noqa: E402
from pdmpi.transport.dtypes import known_sum  # noqa: E402

CHECKS: list[Callable[[CudaTransport, Any], object]] = []

_SPIN = """
extern "C" __global__ void spin(long long ns) {
    long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < ns);
}
"""


@functools.cache
def spin_kernel() -> Any:
    return cupy.RawKernel(_SPIN, "spin")


def check(function: Callable[[CudaTransport, Any], object]) -> Callable[[CudaTransport, Any], object]:
    CHECKS.append(function)
    return function


def slow_fill(stream: Any, buffer: Any, value: int, seconds: float) -> None:
    """Queue a kernel that takes a while and only then writes."""
    if ON_GPU:
        with stream:
            spin_kernel()((1,), (1,), (np.int64(seconds * 1e9),))
            buffer.fill(value)
    else:
        stream.enqueue(lambda: (time.sleep(seconds), buffer.fill(value)))


def put(buffer: Any, values: Any) -> None:
    """Copy to the device and wait for it: from pageable memory a copy may return before it has landed."""
    buffer.set(values)
    cupy.cuda.Device().synchronize()


def hold(stream: Any, until: threading.Event) -> None:
    """Let what is queued on the stream from now on wait for an event, a minute at most."""
    if ON_GPU:
        stream.launch_host_func(lambda _: until.wait(60), None)
    else:
        stream.enqueue(lambda: until.wait(60))


def read_later(stream: Any, buffer: Any, seconds: float, into: Any) -> None:
    """Queue a slow kernel and then a copy of the buffer."""
    slow_fill(stream, into, 0, seconds)
    if ON_GPU:
        cupy.cuda.runtime.memcpyAsync(into.data.ptr, buffer.data.ptr, buffer.nbytes, 4, stream.ptr)
    else:
        stream.enqueue(lambda: np.copyto(into, buffer))


@check
def a_send_waits_for_the_kernel_before_it(transport: CudaTransport, stream: Any) -> None:
    """A slow kernel, then a send, over and over: every message has what the kernel wrote."""
    size, repeats = 100_000, 1000 if ON_GPU else 100
    buffer = transport.allocate(size)
    if transport.rank == 0:
        send = transport.bind_send(buffer, 1, 0, 0)
        for number in range(repeats):
            slow_fill(stream, buffer, number % 251, 2e-4)
            send.post().wait()
    else:
        receive = transport.bind_recv(buffer, 0, 0, 0)
        for number in range(repeats):
            receive.post().wait()
            stream.synchronize()
            assert bool((buffer == number % 251).all()), number


@check
def a_receive_waits_for_the_reader_before_it(transport: CudaTransport, stream: Any) -> None:
    """The next message must not overwrite what a queued kernel still reads."""
    size, repeats = 100_000, 300 if ON_GPU else 50
    buffer, seen = transport.allocate(size), transport.allocate(size)
    if transport.rank == 0:
        for number in range(repeats):
            slow_fill(stream, buffer, number % 251, 0)
            transport.post_send(buffer, 1, 1, 0).wait()
    else:
        receive = transport.bind_recv(buffer, 0, 1, 0)
        receive.post().wait()
        for number in range(repeats):
            read_later(stream, buffer, 3e-4, seen)
            following = receive.post() if number + 1 < repeats else None
            stream.synchronize()
            assert bool((seen == number % 251).all()), number
            if following is not None:
                following.wait()


@check
def messages_of_every_size(transport: CudaTransport, stream: Any) -> None:
    largest = [1 << 30, (1 << 31) + 5] if ON_GPU else [1 << 22]  # counts of 2^31 fail without parts
    for size in (0, 1, 7, 4096, 65_537, 1 << 20, *largest):
        mine, theirs = transport.allocate(size), transport.allocate(size)
        send = transport.bind_send(mine, 1 - transport.rank, 2, 1)
        receive = transport.bind_recv(theirs, 1 - transport.rank, 2, 1)
        for number in range(3):
            slow_fill(stream, mine, 1 + number + 10 * transport.rank, 0)
            arriving, leaving = receive.post(), send.post()
            arriving.wait()
            leaving.wait()
            stream.synchronize()
            assert bool((theirs == 1 + number + 10 * (1 - transport.rank)).all()), size


@check
def long_messages_go_in_parts(transport: CudaTransport, stream: Any) -> None:
    usual, transport.max_message_bytes = transport.max_message_bytes, 1000
    buffer = transport.allocate(12_345)
    if transport.rank == 0:
        slow_fill(stream, buffer, 77, 0)
        transport.post_send(buffer, 1, 3, 0).wait()
    else:
        transport.post_recv(buffer, 0, 3, 0).wait()
        stream.synchronize()
        assert bool((buffer == 77).all())
    transport.max_message_bytes = usual
    transport.barrier()


@check
def host_buffers_go_at_once(transport: CudaTransport, stream: Any) -> None:
    mine, theirs = np.full(64, transport.rank, np.uint8), np.zeros(64, np.uint8)
    gone = threading.Event()
    hold(stream, gone)
    send = transport.bind_send(mine, 1 - transport.rank, 4, 0).post()
    transport.bind_recv(theirs, 1 - transport.rank, 4, 0).post().wait()
    send.wait()
    assert not stream.done
    gone.set()
    stream.synchronize()
    transport.barrier()
    assert (theirs == 1 - transport.rank).all()


@check
def sums_in_every_dtype(transport: CudaTransport, stream: Any) -> None:
    everyone = [0, 1]
    dtypes = ["float32", "float64", "bfloat16", "float16", "int32", "int64"]
    transport.prepare([everyone, [0], [1]], dtypes)
    for dtype in dtypes:
        mine, expected = known_sum(dtype, 2, transport.rank)
        buffer: Any = transport.allocate(mine.nbytes)
        bound = transport.bind_allreduce(buffer, dtype, everyone)
        for _ in range(3):
            slow_fill(stream, buffer, 0, 1e-4)
            stream.synchronize()
            put(buffer, mine)
            bound.post().wait()
            stream.synchronize()
            assert np.array_equal(cupy.asnumpy(buffer), expected), dtype


@check
def sums_overlap_with_messages(transport: CudaTransport, stream: Any) -> None:
    gradient: Any = transport.allocate(1 << 20)
    put(gradient, np.ones(1 << 18, np.float32).view(np.uint8))
    buffer = transport.allocate(1 << 20)
    total = transport.bind_allreduce(gradient, "float32", [0, 1])
    for number in range(5):
        request = total.post()
        if transport.rank == 0:
            slow_fill(stream, buffer, number, 1e-4)
            transport.post_send(buffer, 1, 5, 0).wait()
        else:
            transport.post_recv(buffer, 0, 5, 0).wait()
        request.wait()
    stream.synchronize()
    assert bool((cupy.asnumpy(gradient).view(np.float32) == 2.0**5).all())


def main() -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    way, reduction = sys.argv[1:3]
    transport = CudaTransport(
        30.0, compute_stream=lambda: stream.ptr, aware=way == "aware", use_nccl=reduction == "nccl"
    )
    run_checks(CHECKS, transport, stream)


if __name__ == "__main__":
    main()
