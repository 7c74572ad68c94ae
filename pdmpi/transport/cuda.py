"""Transfers and sums of device memory: the only place where cupy moves anything between ranks.

Everything is ordered by one stream, the one that computes.  Posting records an event on
it: a send leaves, and a receive may overwrite, once the kernels queued before are done.
Waiting for a received message blocks the host; what it launches afterwards may read it.
A sum by NCCL runs on a stream of its own, and its wait only makes the computing stream
wait.  When MPI does not take device memory, messages pass through pinned host buffers,
copied on side streams.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np
from cupy.cuda import nccl

from pdmpi.errors import InputError, PdmpiError
from pdmpi.transport.base import Bound, Bytes, Request
from pdmpi.transport.dtypes import known_sum
from pdmpi.transport.mpi import MpiTransport
from pdmpi.transport.operation import Operation

__all__ = ["CudaTransport", "device_id", "is_device_buffer", "nccl_problem"]

_NCCL_TYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "int64": 4, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
"""``ncclDataType_t`` of nccl.h; CuPy has no name for bfloat16 in every version."""

_BURST, _SPIN_S, _MAX_SLEEP_S, _MAX_ASIDE_S = 16, 20e-3, 50e-6, 1.5e-3
"""A rank that drives a GPU has a core to spare, and its messages take tens of microseconds.

A sleep of 20 µs takes 70 (the kernel's timer slack), and a message of 256 MiB moves in 700; meanwhile the
second thread takes the interpreter, for 5 to 10 µs, whenever it wakes.
"""


_ITEM_BYTES = {name: 2 if name == "bfloat16" else np.dtype(name).itemsize for name in _NCCL_TYPES}


def is_device_buffer(buffer: object) -> bool:
    """Whether a buffer lies on a device."""
    return isinstance(buffer, cupy.ndarray)


def device_id() -> str:
    """Return what tells the current device from others of its host (its PCI bus id)."""
    return str(cupy.cuda.Device().pci_bus_id)


def nccl_problem() -> str:
    """Return why NCCL cannot be used, or nothing."""
    return "" if nccl.available else "this CuPy finds no NCCL (pip install nvidia-nccl-cu13, or cu12)"


class CudaTransport(MpiTransport):
    """Transfers between the devices of the ranks; host buffers go as in `MpiTransport`.

    Parameters
    ----------
    stall_timeout_s
        Longest wait for one transfer, in seconds.
    compute_stream
        Returns the pointer of the stream that computes, as ``torch.cuda.current_stream().cuda_stream``.
        Every message asks for it.
    aware
        Whether MPI takes device memory (`probe_awareness`).
    use_nccl
        Sum by NCCL; otherwise by MPI through pinned host buffers.  NCCL wants a device of
        its own for each rank.
    """

    def __init__(
        self,
        stall_timeout_s: float = 300.0,
        *,
        compute_stream: Callable[[], int],
        aware: bool,
        use_nccl: bool = True,
    ) -> None:
        device = cupy.cuda.Device()
        super().__init__(
            stall_timeout_s,
            burst=_BURST,
            on_thread=device.use,
            spin_s=_SPIN_S,
            max_sleep_s=_MAX_SLEEP_S,
            max_aside_s=_MAX_ASIDE_S,
        )
        self._compute_stream = compute_stream
        self._streams_by_pointer: dict[int, Any] = {}
        self._aware = aware
        self._use_nccl = use_nccl
        self._memory = cupy.cuda.MemoryPool()
        self.outward, self.inward, self.summing = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
        self._communicators: dict[tuple[int, ...], Any] = {}
        self._held: deque[tuple[Any, tuple[Any, ...]]] = deque()

    @property
    def sums_on_device(self) -> bool:
        """Whether NCCL sums."""
        return self._use_nccl

    @property
    def device_bytes(self) -> int:
        """Bytes of `allocate` that are in use."""
        return int(self._memory.used_bytes())

    def compute(self) -> Any:
        """Return the stream that computes now."""
        pointer = self._compute_stream()
        if pointer not in self._streams_by_pointer:
            self._streams_by_pointer[pointer] = cupy.cuda.ExternalStream(pointer)
        return self._streams_by_pointer[pointer]

    def hold(self, event: Any, *buffers: Any) -> None:
        """Keep the buffers of a copy until it is done, even if nobody else does."""
        while self._held and self._held[0][0].done:
            self._held.popleft()
        self._held.append((event, buffers))

    def allocate(self, nbytes: int) -> Bytes:
        """Return device memory from plain ``cudaMalloc``, which CUDA IPC can share with other ranks.

        Torch's expandable segments and ``cudaMallocAsync`` cannot be shared.
        """
        buffer: Bytes = cupy.ndarray(nbytes, cupy.uint8, memptr=self._memory.malloc(max(nbytes, 1)))
        buffer.fill(0)
        cupy.cuda.Device().synchronize()
        return buffer

    def prepare(self, groups: Sequence[Sequence[int]], dtypes: Sequence[str] = ()) -> None:
        """Make the groups' communicators, of MPI and of NCCL, and sum known values in each dtype."""
        super().prepare(groups, dtypes)
        for group in groups:
            key = tuple(group)
            if self._use_nccl and len(key) > 1 and key not in self._communicators:
                self._communicators[key] = self._open_nccl(key)
            for dtype in dtypes:
                if self.rank in key:
                    self._check_device_sum(key, dtype)

    def post_send(self, buffer: Bytes, peer: int, tag: int, stream: int) -> Request:
        """Start to send once the kernels queued so far are done."""
        if is_device_buffer(buffer):
            return self.bind_send(buffer, peer, tag, stream).post()
        return super().post_send(buffer, peer, tag, stream)

    def post_recv(self, buffer: Bytes, peer: int, tag: int, stream: int) -> Request:
        """Start to receive once the kernels queued so far are done."""
        if is_device_buffer(buffer):
            return self.bind_recv(buffer, peer, tag, stream).post()
        return super().post_recv(buffer, peer, tag, stream)

    def bind_send(self, buffer: Bytes, peer: int, tag: int, stream: int) -> Bound:
        """Return a repeatable `post_send`."""
        if not is_device_buffer(buffer):
            return super().bind_send(buffer, peer, tag, stream)
        if self._aware:
            return _Gated(self, self._persistent(buffer, peer, tag, stream, sending=True))
        host = _pinned(buffer.nbytes)
        return _StagedSend(self, self._persistent(host, peer, tag, stream, sending=True), buffer, host)

    def bind_recv(self, buffer: Bytes, peer: int, tag: int, stream: int) -> Bound:
        """Return a repeatable `post_recv`."""
        if not is_device_buffer(buffer):
            return super().bind_recv(buffer, peer, tag, stream)
        if self._aware:
            return _Gated(self, self._persistent(buffer, peer, tag, stream, sending=False))
        host = _pinned(buffer.nbytes)
        return _StagedReceive(self, self._persistent(host, peer, tag, stream, sending=False), buffer, host)

    def bind_allreduce(self, buffer: Bytes, dtype: str, ranks: Sequence[int]) -> Bound:
        """Return a repeatable `post_allreduce`."""
        if not is_device_buffer(buffer):
            return super().bind_allreduce(buffer, dtype, ranks)
        if not self._use_nccl:
            host = _pinned(buffer.nbytes)
            return _StagedSum(self, self._sum(host, dtype, ranks), buffer, host)
        if dtype not in _NCCL_TYPES:
            raise InputError(f"NCCL cannot sum {dtype}; it sums {', '.join(_NCCL_TYPES)}")
        return _NcclSum(self, self._communicators.get(tuple(ranks)), buffer, dtype)

    def close(self) -> None:
        """Wait for every rank and every stream, then give all back.

        NCCL ends a communicator only after the CUDA graphs that hold sums of it: those that
        nobody refers to any more are collected here.
        """
        cupy.cuda.Device().synchronize()
        super().close()
        gc.collect()
        for communicator in self._communicators.values():
            if communicator is not None:
                communicator.destroy()

    def _open_nccl(self, ranks: tuple[int, ...]) -> Any:
        unique: Any = nccl.get_unique_id()  # bytes since CuPy 14, a tuple of integers before
        packed = unique if isinstance(unique, bytes) else np.array(unique, np.int16).tobytes()
        shared = self.broadcast(packed, root=ranks[0])
        if self.rank not in ranks:
            return None
        same = shared if isinstance(unique, bytes) else tuple(np.frombuffer(shared, np.int16).tolist())
        return nccl.NcclCommunicator(len(ranks), same, ranks.index(self.rank))

    def _check_device_sum(self, ranks: tuple[int, ...], dtype: str) -> None:
        """Sum known values on the device."""
        mine, expected = known_sum(dtype, len(ranks), ranks.index(self.rank))
        buffer: Any = self.allocate(mine.nbytes)
        buffer.set(mine)
        cupy.cuda.Device().synchronize()
        self.bind_allreduce(buffer, dtype, ranks).post().wait()
        cupy.cuda.Device().synchronize()
        if not np.array_equal(cupy.asnumpy(buffer), expected):
            how = "NCCL" if self._use_nccl else "MPI"
            raise PdmpiError(f"{how} sums {dtype} wrongly over ranks {list(ranks)}")


class _Gated:
    """A transfer of device memory by MPI itself, started when the kernels before it are done."""

    def __init__(self, owner: CudaTransport, operation: Operation) -> None:
        self._owner = owner
        self._operation = operation
        self._event = _event()

    def post(self) -> Operation:
        stream = self._owner.compute()
        if not self._owner.deferred and stream.done:
            return self._operation.post()
        self._event.record(stream)
        return self._operation.post_when(self._is_due)

    def _is_due(self) -> bool:
        return bool(self._event.done)


class _Staged:
    """A transfer or sum by MPI on a pinned host copy of a device buffer."""

    def __init__(self, owner: CudaTransport, operation: Operation, device: Any, host: Bytes) -> None:
        self._owner = owner
        self._operation = operation
        self._device = device
        self._host = host
        self._queued, self._copied = _event(), _event()

    def _copy_out(self) -> None:
        """Copy to the host after the kernels queued so far, beside those that follow."""
        stream = self._owner.outward
        self._queued.record(self._owner.compute())
        stream.wait_event(self._queued)
        _copy(self._host.ctypes.data, self._device.data.ptr, self._host.nbytes, stream)
        self._copied.record(stream)

    def _copy_in(self) -> None:
        """Copy to the device after the kernels that were queued at the start, before those that follow."""
        stream = self._owner.inward
        stream.wait_event(self._queued)
        _copy(self._device.data.ptr, self._host.ctypes.data, self._host.nbytes, stream)
        self._copied.record(stream)
        self._owner.compute().wait_event(self._copied)
        self._owner.hold(self._copied, self._host, self._device)

    def _is_copied(self) -> bool:
        return bool(self._copied.done)


class _StagedSend(_Staged):
    def post(self) -> Operation:
        self._copy_out()
        return self._operation.post_when(self._is_copied)


class _StagedReceive(_Staged):
    _arriving = False

    def post(self) -> _StagedReceive:
        self._queued.record(self._owner.compute())
        self._operation.post_when(self._is_copied)  # the message before left the host buffer
        self._arriving = True
        return self

    def wait(self) -> None:
        self._operation.wait()
        if self._arriving:
            self._copy_in()
            self._arriving = False


class _StagedSum(_Staged):
    _summing = False

    def post(self) -> _StagedSum:
        self._copy_out()
        self._operation.post_when(self._is_copied)
        self._summing = True
        return self

    def wait(self) -> None:
        self._operation.wait()
        if self._summing:
            self._copy_in()
            self._summing = False


class _NcclSum:
    """A sum in place, on the stream for sums."""

    def __init__(self, owner: CudaTransport, communicator: Any, buffer: Any, dtype: str) -> None:
        self._owner = owner
        self._communicator = communicator
        self._pointer = buffer.data.ptr
        self._type = _NCCL_TYPES[dtype]
        self._count = buffer.nbytes // _ITEM_BYTES[dtype]
        self._queued, self._summed = _event(), _event()

    def post(self) -> _NcclSum:
        if self._communicator is not None:
            stream = self._owner.summing
            self._queued.record(self._owner.compute())
            stream.wait_event(self._queued)
            self._communicator.allReduce(
                self._pointer, self._pointer, self._count, self._type, nccl.NCCL_SUM, stream.ptr
            )
            self._summed.record(stream)
        return self

    def wait(self) -> None:
        """Let what is queued on the computing stream from now on wait for the sum."""
        if self._communicator is not None:
            self._owner.compute().wait_event(self._summed)


def _event() -> Any:
    return cupy.cuda.Event(disable_timing=True)


def _pinned(nbytes: int) -> Bytes:
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(max(nbytes, 1)), np.uint8, nbytes)


def _copy(target: int, source: int, nbytes: int, stream: Any) -> None:
    cupy.cuda.runtime.memcpyAsync(target, source, nbytes, cupy.cuda.runtime.memcpyDefault, stream.ptr)
