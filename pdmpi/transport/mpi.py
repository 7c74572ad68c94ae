"""Transfers over MPI from host memory: the only place that imports mpi4py.

Importing this module initialises MPI, so a device is chosen before.

The thread that calls makes its MPI calls itself: a persistent request starts in 0.3 µs, an
`Isend` in 1 µs (Open MPI 5.0 and MPICH 5.0, one host).
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdmpi.errors import InputError, PdmpiError, RankFailure
from pdmpi.transport.base import Bound, Bytes, Request
from pdmpi.transport.dtypes import SUM_DTYPES, known_sum, needs_widening, round_into, summed_view, widened
from pdmpi.transport.heartbeat import Heartbeat
from pdmpi.transport.launcher import check_world_size, set_library_defaults
from pdmpi.transport.operation import Operation, OperationOwner
from pdmpi.transport.progress import Progress

set_library_defaults(os.environ)
from mpi4py import MPI  # noqa: E402 (reads them)

__all__ = ["MAX_MESSAGE_BYTES", "MpiTransport", "Sum", "Transfer", "concurrent", "library"]

MAX_MESSAGE_BYTES = 1 << 30
"""Longer messages are sent in parts of this length: counts of 2^31 and more fail."""

_SUM_PART_BYTES = 4 << 20
"""Parts of a sum: one is added up in the caches while others travel (64 MiB over TCP: 0.6 of the time)."""

_NUM_STREAMS = 2
_HEADER_TAG, _DATA_TAG = 0, 1
_NOBODY_TAG, _LIFE_TAG = 0, 1


def library() -> str:
    """Return the MPI library's name and version, on one line."""
    text = MPI.Get_library_version().replace("\0", "").strip()
    first = text.splitlines()[0].split(", package:")[0]
    return " ".join(first.replace("MPICH Version:", "MPICH").split()).rstrip(",")


def concurrent() -> bool:
    """Whether several threads may call MPI at the same time."""
    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


class Transfer(Operation):
    """A message in one part or several."""

    def __init__(
        self, owner: MpiTransport, comm: MPI.Intracomm, buffer: Bytes, peer: int, tag: int,
        *, sending: bool, persistent: bool,
    ) -> None:  # fmt: skip
        super().__init__(owner)
        self._peer, self._tag, self._sending = peer, tag, sending
        self._nbytes = buffer.nbytes
        self._status = owner.status
        self._burst = range(owner.burst)
        self._next = 0
        parts = _parts(buffer, owner.max_message_bytes)
        self._lengths = [part.nbytes for part in parts]
        self._calls: list[Callable[[], MPI.Request]] = []
        self._requests: list[MPI.Request] = []
        if persistent:
            bind: Any = comm.Send_init if sending else comm.Recv_init
            persistents = [bind([part, MPI.BYTE], peer, tag) for part in parts]
            self._requests = persistents
            weakref.finalize(self, _free, persistents).atexit = False
        else:
            call: Any = comm.Isend if sending else comm.Irecv
            self._calls = [functools.partial(call, [part, MPI.BYTE], peer, tag) for part in parts]

    def _start(self) -> None:
        self._next = 0
        if self._calls:
            self._requests = [call() for call in self._calls]
        else:
            for request in self._requests:
                request.Start()  # type: ignore[attr-defined]

    def _done(self) -> bool:
        status = None if self._sending else self._status
        while self._next < len(self._requests):
            test = self._requests[self._next].Test
            for _ in self._burst:
                if test(status):
                    break
            else:
                return False
            if status is not None:
                count = status.Get_count(MPI.BYTE)
                if count != self._lengths[self._next]:
                    raise self._failed(f"the message has {count} bytes in part {self._next}")
            self._next += 1
        return True

    def _what(self) -> str:
        verb = "send" if self._sending else "receive"
        return f"{verb} {self._nbytes} bytes (tag {self._tag}), peer {self._owner.describe(self._peer)}"


class Sum(Operation):
    """A sum over a group, in place."""

    def __init__(
        self, owner: MpiTransport, comm: MPI.Comm | None, buffer: Bytes, dtype: str, ranks: Sequence[int]
    ) -> None:
        super().__init__(owner)
        self._comm = comm
        self._buffer = buffer
        self._dtype = dtype
        self._ranks = ranks
        wide = needs_widening(dtype)
        values = np.empty(buffer.nbytes // 2, np.float32) if wide else summed_view(buffer, dtype)
        self._wide: NDArray[Any] | None = values if wide else None
        mpi_type = _MPI_TYPES[SUM_DTYPES[dtype]]
        part_bytes = min(owner.max_message_bytes, _SUM_PART_BYTES)
        self._specs = [[part, mpi_type] for part in _parts(values, part_bytes)]
        self._requests: list[MPI.Request] = []

    def _start(self) -> None:
        if self._comm is None:
            return
        if self._wide is not None:
            widened(self._buffer, self._dtype, out=self._wide)
        self._requests = [self._comm.Iallreduce(MPI.IN_PLACE, spec) for spec in self._specs]

    def _done(self) -> bool:
        return all(request.Test() for request in self._requests)

    def _finish(self) -> None:
        if self._wide is not None and self._comm is not None:
            round_into(self._wide, self._dtype, self._buffer)

    def _what(self) -> str:
        group = ", ".join(self._owner.describe(rank) for rank in self._ranks)
        return f"sum {self._buffer.nbytes} bytes with {group}"


class MpiTransport(OperationOwner):
    """Transfers between the ranks of ``MPI.COMM_WORLD``, from host memory.

    Created by every rank at the same time, used by one thread.

    Parameters
    ----------
    stall_timeout_s
        Longest wait for one transfer, in seconds; then `RankFailure` is raised.
    max_message_bytes
        Longer messages go in parts.
    burst
        Looks at a message before anything else is looked at: with less between them a message of a few
        microseconds is seen earlier, and a core that others want is kept longer.
    polling
        Options of `Progress`.

    Raises
    ------
    InputError
        If the launcher started several processes that each are a world of their own.
    """

    def __init__(
        self,
        stall_timeout_s: float = 300.0,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        burst: int = 1,
        **polling: Any,
    ) -> None:
        world = MPI.COMM_WORLD
        check_world_size(world.Get_size(), library(), os.environ)
        super().__init__(world.Get_rank())
        self._size = world.Get_size()
        self.max_message_bytes = max_message_bytes
        self.burst = burst
        self.status = MPI.Status()
        self._streams = [world.Dup() for _ in range(_NUM_STREAMS)]
        self._control = world.Dup()
        self._idle = world.Dup()
        self._groups: dict[tuple[int, ...], MPI.Comm | None] = {}
        self.progress = Progress(self._poke if concurrent() else None, stall_timeout_s, **polling)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size

    @property
    def sums_on_device(self) -> bool:
        """No: the host sums."""
        return False

    def prepare(self, groups: Sequence[Sequence[int]], dtypes: Sequence[str] = ()) -> None:
        """Make the groups' communicators (all ranks together), and sum known values in each dtype.

        Raises
        ------
        InputError
            If a dtype cannot be summed.
        PdmpiError
            If the ranks disagree on the groups, or the library sums a dtype wrongly.
        """
        for dtype in dtypes:
            needs_widening(dtype)
        keys = [tuple(ranks) for ranks in groups]
        wanted = self.gather(repr((keys, list(dtypes))).encode())
        differing = [rank for rank, text in enumerate(wanted) if text != wanted[0]]
        agreed = self.broadcast(repr(differing).encode()).decode()
        if agreed != "[]":
            raise PdmpiError(f"ranks {agreed} prepare other groups or dtypes than rank 0; here: {keys}")
        for key in keys:
            if key not in self._groups:
                self._groups[key] = self._make_group(key)
        for key in keys:
            if self.rank in key:
                for dtype in dtypes:
                    self._check_sum(key, dtype)

    def allocate(self, nbytes: int) -> Bytes:
        """Return a buffer of zeros that transfers are fast from."""
        return np.zeros(nbytes, np.uint8)

    def post_send(self, buffer: Bytes, peer: int, tag: int, stream: int) -> Request:
        """Start to send."""
        return self._transfer(buffer, peer, tag, self._streams[stream], sending=True)

    def post_recv(self, buffer: Bytes, peer: int, tag: int, stream: int) -> Request:
        """Start to receive."""
        return self._transfer(buffer, peer, tag, self._streams[stream], sending=False)

    def post_allreduce(self, buffer: Bytes, dtype: str, ranks: Sequence[int]) -> Request:
        """Start to sum in place."""
        return self.bind_allreduce(buffer, dtype, ranks).post()

    def bind_send(self, buffer: Bytes, peer: int, tag: int, stream: int) -> Bound:
        """Return a repeatable `post_send`."""
        return self._persistent(buffer, peer, tag, stream, sending=True)

    def bind_recv(self, buffer: Bytes, peer: int, tag: int, stream: int) -> Bound:
        """Return a repeatable `post_recv`."""
        return self._persistent(buffer, peer, tag, stream, sending=False)

    def bind_allreduce(self, buffer: Bytes, dtype: str, ranks: Sequence[int]) -> Bound:
        """Return a repeatable `post_allreduce`."""
        return self._sum(buffer, dtype, ranks)

    def _sum(self, buffer: Bytes, dtype: str, ranks: Sequence[int]) -> Sum:
        key = tuple(ranks)
        if key not in self._groups:
            raise InputError(f"ranks {list(key)} are no prepared group; prepared: {sorted(self._groups)}")
        return Sum(self, self._groups[key], buffer, dtype, key)

    def broadcast(self, data: bytes, root: int = 0) -> bytes:
        """Return ``root``'s bytes on every rank."""
        length = np.array([len(data)], np.int64)
        self._finish(self._control.Ibcast([length, MPI.INT64_T], root), "broadcast a length")
        buffer = np.empty(int(length[0]), np.uint8)
        if self.rank == root:
            buffer[...] = np.frombuffer(data, np.uint8)
        for part in _parts(buffer, self.max_message_bytes):
            self._finish(self._control.Ibcast([part, MPI.BYTE], root), f"broadcast {part.nbytes} bytes")
        return buffer.tobytes()

    def gather(self, data: bytes, root: int = 0) -> list[bytes]:
        """Return every rank's bytes, by rank, on ``root``."""
        if self.rank != root:
            length = np.array([len(data)], np.int64).view(np.uint8)
            self._meet(length, root, _HEADER_TAG, sending=True)
            self._meet(np.frombuffer(data, np.uint8), root, _DATA_TAG, sending=True)
            return []
        found = []
        for rank in range(self.size):
            if rank == root:
                found.append(data)
                continue
            length = np.empty(8, np.uint8)
            self._meet(length, rank, _HEADER_TAG, sending=False)
            buffer = np.empty(int(length.view(np.int64)[0]), np.uint8)
            self._meet(buffer, rank, _DATA_TAG, sending=False)
            found.append(buffer.tobytes())
        return found

    def barrier(self) -> None:
        """Wait for every rank."""
        self._finish(self._control.Ibarrier(), "meet all ranks at a barrier")

    def close(self) -> None:
        """Wait for every rank, then give back threads and communicators."""
        self.barrier()
        self.progress.end()
        for comm in (*self._streams, *self._groups.values(), self._control, self._idle):
            if comm is not None:
                comm.Free()

    def heartbeat(self, timeout_s: float) -> AbstractContextManager[object]:
        """Return what ends every rank's wait, while it is entered, once some rank gives no sign of life.

        Needs a library that several threads may call, and more than one rank; does nothing else.
        """
        if self._size == 1 or not concurrent():
            return nullcontext()
        before = (self._rank - 1) % self._size
        return Heartbeat(
            _Ring(self._idle, before),
            timeout_s,
            name=lambda: self.describe(before),
            fail=self.progress.fail,
            meet=self.barrier,
        )

    def abort(self, code: int) -> None:
        """End all ranks at once with an exit code; may be called by any thread."""
        MPI.COMM_WORLD.Abort(code)

    def reason(self, error: RuntimeError) -> str:
        """Return MPI's class of an error, which is one line."""
        return (
            MPI.Get_error_string(error.Get_error_class()) if isinstance(error, MPI.Exception) else str(error)
        )

    def _poke(self) -> None:
        """Let all of MPI's requests progress, by looking for a message that nobody sends."""
        if self.deferred:
            self.start_ready()
        self._idle.Iprobe(self._rank, _NOBODY_TAG)

    def _make_group(self, ranks: tuple[int, ...]) -> MPI.Comm | None:
        world_group = self._control.Get_group()
        group = world_group.Incl(ranks)
        comm = self._control.Create(group)
        group.Free()
        world_group.Free()
        if comm == MPI.COMM_NULL:
            return None
        if len(ranks) == 1:
            comm.Free()
            return None
        return comm

    def _check_sum(self, ranks: tuple[int, ...], dtype: str) -> None:
        """Sum values that are known on every rank."""
        buffer, expected = known_sum(dtype, len(ranks), ranks.index(self.rank))
        self.post_allreduce(buffer, dtype, ranks).wait()
        if not np.array_equal(buffer, expected):
            raise PdmpiError(
                f"{library()} sums {dtype} wrongly over ranks {list(ranks)}; use another MPI library"
            )

    def _persistent(self, buffer: Bytes, peer: int, tag: int, stream: int, *, sending: bool) -> Transfer:
        return Transfer(self, self._streams[stream], buffer, peer, tag, sending=sending, persistent=True)

    def _transfer(
        self, buffer: Bytes, peer: int, tag: int, comm: MPI.Intracomm, *, sending: bool
    ) -> Operation:
        return Transfer(self, comm, buffer, peer, tag, sending=sending, persistent=False).post()

    def _meet(self, buffer: Bytes, peer: int, tag: int, *, sending: bool) -> None:
        """Pass a control message to a rank that may come late."""
        transfer = Transfer(self, self._control, buffer, peer, tag, sending=sending, persistent=False)
        transfer.meeting = True
        transfer.post().wait()

    def _finish(self, request: MPI.Request, what: str) -> None:
        def stalled() -> PdmpiError:
            cause = self.progress.nothing_came(meeting=True)
            return RankFailure(f"{self.describe(self.rank)} could not {what}: {cause}")

        self.progress.started()
        self.progress.wait(request.Test, stalled, meeting=True)


class _Ring:
    """Signs of life from rank to rank: empty messages."""

    def __init__(self, comm: MPI.Intracomm, before: int) -> None:
        self._comm = comm
        self._before = before
        self._after = (comm.Get_rank() + 1) % comm.Get_size()
        self._nothing = np.empty(0, np.uint8)
        self._sent: MPI.Request = MPI.REQUEST_NULL

    def beat(self) -> None:
        """Send a sign of life, unless the last one is still on its way."""
        if self._sent.Test():
            self._sent = self._comm.Isend([self._nothing, MPI.BYTE], self._after, _LIFE_TAG)

    def heard(self) -> bool:
        """Take all that have come."""
        heard = False
        while self._comm.Iprobe(self._before, _LIFE_TAG):
            self._comm.Recv([np.empty(0, np.uint8), MPI.BYTE], self._before, _LIFE_TAG)
            heard = True
        return heard


_MPI_TYPES = {
    "float32": MPI.FLOAT, "float64": MPI.DOUBLE, "int8": MPI.INT8_T, "uint8": MPI.UINT8_T,
    "int16": MPI.INT16_T, "int32": MPI.INT32_T, "int64": MPI.INT64_T,
}  # fmt: skip


def _parts(values: NDArray[Any], max_bytes: int) -> list[NDArray[Any]]:
    """Cut a one-dimensional array into pieces; an empty one is a piece of its own."""
    assert values.ndim == 1, values.shape
    assert values.flags.c_contiguous
    step = max(1, max_bytes // values.itemsize)
    return [values[start : start + step] for start in range(0, max(1, values.size), step)]


def _free(requests: list[Any]) -> None:
    if not MPI.Is_finalized():
        for request in requests:
            request.Free()
