"""Every rank a thread of one process: the transport of tests.

With ``rendezvous=True`` a send is done only once a receive for it was posted, as MPI does
with large messages; code that relies on buffering then deadlocks, and `LocalWorld.run`
says so at once instead of waiting.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pdmpi.errors import InputError, PdmpiError, RankFailure
from pdmpi.transport.base import Bytes
from pdmpi.transport.dtypes import needs_widening, round_into, summed_view, widened

__all__ = ["LocalTransport", "LocalWorld"]

T = TypeVar("T")
_Key = tuple[int, int, int, int]
"""Source, target, tag, stream."""
_Combine = Callable[[Mapping[int, Bytes]], None]
"""Replaces the parts that the ranks brought by their result, in place."""


@dataclass(eq=False)
class _Pending:
    """One side of a transfer, or one rank's part in a collective."""

    world: LocalWorld
    rank: int
    what: str
    buffer: Bytes
    done: bool = False
    error: PdmpiError | None = None
    parts: Mapping[int, Bytes] = field(default_factory=dict)

    def wait(self) -> None:
        self.world.pause(self.rank)
        self.world.wait(self)
        if self.error is not None:
            raise self.error


@dataclass(eq=False)
class _Collective:
    """What the ranks of a group have brought so far."""

    parts: dict[int, Bytes] = field(default_factory=dict)
    requests: list[_Pending] = field(default_factory=list)


class LocalWorld:
    """Ranks that share a process.

    Parameters
    ----------
    size
        Number of ranks.
    rendezvous
        Sends wait for their receive; otherwise they are buffered.
    seed
        If given, every operation is preceded by a random delay of up to ``jitter_s``, so
        that threads interleave differently for each seed.
    jitter_s
        Longest delay, in seconds.
    timeout_s
        Longest wait, in seconds.
    """

    def __init__(
        self,
        size: int,
        rendezvous: bool = True,
        *,
        seed: int | None = None,
        jitter_s: float = 1e-4,
        timeout_s: float = 60.0,
    ) -> None:
        self.size = size
        self.rendezvous = rendezvous
        self.timeout_s = timeout_s
        self._jitter_s = jitter_s
        self._random = None if seed is None else [random.Random(seed * size + rank) for rank in range(size)]
        self._changed = threading.Condition()
        self._sends: dict[_Key, deque[_Pending]] = defaultdict(deque)
        self._recvs: dict[_Key, deque[_Pending]] = defaultdict(deque)
        self._collectives: dict[tuple[object, ...], _Collective] = defaultdict(_Collective)
        self._failure: PdmpiError | None = None
        self._waiting: dict[int, _Pending] = {}
        self._running: set[int] | None = None

    def transport(self, rank: int) -> LocalTransport:
        """Return what rank ``rank`` uses."""
        return LocalTransport(self, rank)

    def run(self, main: Callable[[LocalTransport], T]) -> list[T]:
        """Run ``main`` on every rank in a thread of its own and return the results by rank.

        The first exception of a rank ends the others and is raised here.  When every rank
        that still runs waits for another, that is a deadlock and raises `RankFailure`.
        """
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                results[rank] = main(self.transport(rank))
            except BaseException as error:  # handed to the caller's thread
                errors.append(error)
                self.fail(RankFailure(f"rank {rank} failed: {error!r}"))
            finally:
                self._leave(rank)

        self._running = set(range(self.size))
        threads = [
            threading.Thread(target=body, args=(rank,), name=f"rank {rank}") for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(self.size)]

    def fail(self, error: PdmpiError) -> None:
        """End every wait of every rank with an error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def pause(self, rank: int) -> None:
        """Let other threads run for a random moment."""
        if self._random is not None:
            time.sleep(self._random[rank].random() * self._jitter_s)

    def post(self, key: _Key, buffer: Bytes, sending: bool) -> _Pending:
        """Start one side of a transfer, and finish both when the other side is there."""
        source, target, tag, stream = key
        rank = source if sending else target
        verb = f"send to rank {target}" if sending else f"receive from rank {source}"
        request = _Pending(self, rank, f"{verb} (tag {tag}, stream {stream}, {buffer.nbytes} bytes)", buffer)
        self.pause(rank)
        with self._changed:
            mine, others = (self._sends, self._recvs) if sending else (self._recvs, self._sends)
            if sending and not self.rendezvous:
                request.buffer = buffer.copy()
                request.done = True
            if others[key]:
                other = others[key].popleft()
                _deliver(*((request, other) if sending else (other, request)))
                self._changed.notify_all()
            else:
                mine[key].append(request)
        return request

    def collect(
        self, rank: int, name: str, number: int, ranks: tuple[int, ...], part: Bytes, combine: _Combine | None
    ) -> _Pending:
        """Bring one rank's part of a group's operation; the last one to come combines them."""
        self.pause(rank)
        request = _Pending(self, rank, f"finish the {name} over ranks {list(ranks)}", part)
        key = (name, ranks, number)
        with self._changed:
            collective = self._collectives[key]
            collective.parts[rank] = part
            collective.requests.append(request)
            if len(collective.parts) == len(ranks):
                del self._collectives[key]
                error = None
                try:
                    if combine is not None:
                        combine(collective.parts)
                except PdmpiError as problem:
                    error = problem
                for pending in collective.requests:
                    pending.parts, pending.error, pending.done = collective.parts, error, True
                self._changed.notify_all()
        return request

    def wait(self, request: _Pending) -> None:
        """Block until a request is done."""
        deadline = time.monotonic() + self.timeout_s
        with self._changed:
            self._waiting[request.rank] = request
            try:
                while not request.done:
                    self._find_deadlock()
                    if self._failure is not None:
                        raise self._failure
                    left = deadline - time.monotonic()
                    if left <= 0:
                        self._failure = RankFailure(
                            f"rank {request.rank} waited {self.timeout_s:g} s to {request.what}"
                        )
                        self._changed.notify_all()
                        raise self._failure
                    self._changed.wait(left)
            finally:
                del self._waiting[request.rank]

    def _leave(self, rank: int) -> None:
        with self._changed:
            if self._running is not None:
                self._running.discard(rank)
            self._find_deadlock()

    def _find_deadlock(self) -> None:
        """Fail when no rank can move any more (the lock is held)."""
        if not self._running or self._failure is not None:
            return
        stuck = [r for r in self._running if r in self._waiting and not self._waiting[r].done]
        if len(stuck) == len(self._running):
            waits = "; ".join(f"rank {r} waits to {self._waiting[r].what}" for r in sorted(stuck))
            self._failure = RankFailure(f"deadlock: {waits}")
            self._changed.notify_all()


def _deliver(send: _Pending, recv: _Pending) -> None:
    if send.buffer.nbytes == recv.buffer.nbytes:
        recv.buffer[...] = send.buffer
    else:
        recv.error = RankFailure(
            f"rank {recv.rank} was to {recv.what}, but the message has {send.buffer.nbytes} bytes"
        )
    send.done = recv.done = True


@dataclass(eq=False)
class _Bound:
    start: Callable[[], _Pending]

    def post(self) -> _Pending:
        return self.start()


class LocalTransport:
    """One rank's end of a `LocalWorld`; used by one thread."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self._world = world
        self._rank = rank
        self._counts: dict[tuple[object, ...], int] = defaultdict(int)
        self._groups: set[tuple[int, ...]] = set()

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._world.size

    @property
    def sums_on_device(self) -> bool:
        """No: the host sums."""
        return False

    def prepare(self, groups: Sequence[Sequence[int]], dtypes: Sequence[str] = ()) -> None:
        """Allow sums over these groups."""
        for dtype in dtypes:
            needs_widening(dtype)
        self._groups.update(tuple(group) for group in groups)
        self.barrier()

    def allocate(self, nbytes: int) -> Bytes:
        """Return a buffer of zeros."""
        return np.zeros(nbytes, np.uint8)

    def post_send(self, buffer: Bytes, peer: int, tag: int, stream: int) -> _Pending:
        """Start to send."""
        return self._world.post((self._rank, peer, tag, stream), buffer, sending=True)

    def post_recv(self, buffer: Bytes, peer: int, tag: int, stream: int) -> _Pending:
        """Start to receive."""
        return self._world.post((peer, self._rank, tag, stream), buffer, sending=False)

    def post_allreduce(self, buffer: Bytes, dtype: str, ranks: Sequence[int]) -> _Pending:
        """Start to sum in place."""
        group = tuple(ranks)
        if group not in self._groups:
            raise InputError(f"ranks {list(group)} are no prepared group; prepared: {sorted(self._groups)}")
        needs_widening(dtype)
        return self._collect("sum", group, buffer, lambda parts: _sum_in_place(parts, dtype))

    def bind_send(self, buffer: Bytes, peer: int, tag: int, stream: int) -> _Bound:
        """Return a repeatable `post_send`."""
        return _Bound(lambda: self.post_send(buffer, peer, tag, stream))

    def bind_recv(self, buffer: Bytes, peer: int, tag: int, stream: int) -> _Bound:
        """Return a repeatable `post_recv`."""
        return _Bound(lambda: self.post_recv(buffer, peer, tag, stream))

    def bind_allreduce(self, buffer: Bytes, dtype: str, ranks: Sequence[int]) -> _Bound:
        """Return a repeatable `post_allreduce`."""
        return _Bound(lambda: self.post_allreduce(buffer, dtype, ranks))

    def broadcast(self, data: bytes, root: int = 0) -> bytes:
        """Return ``root``'s bytes."""
        return self._exchange("broadcast", data)[root]

    def gather(self, data: bytes, root: int = 0) -> list[bytes]:
        """Return every rank's bytes on ``root``."""
        parts = self._exchange("gather", data)
        return parts if self._rank == root else []

    def barrier(self) -> None:
        """Wait for every rank."""
        self._exchange("barrier", b"")

    def close(self) -> None:
        """Wait for every rank."""
        self.barrier()

    def _exchange(self, name: str, data: bytes) -> list[bytes]:
        request = self._collect(name, tuple(range(self.size)), np.frombuffer(data, np.uint8), None)
        request.wait()
        return [request.parts[rank].tobytes() for rank in range(self.size)]

    def _collect(self, name: str, group: tuple[int, ...], part: Bytes, combine: _Combine | None) -> _Pending:
        self._counts[name, group] += 1
        return self._world.collect(self._rank, name, self._counts[name, group], group, part, combine)


def _sum_in_place(parts: Mapping[int, Bytes], dtype: str) -> None:
    """Sum in the order of ranks, so that the result depends on nothing else."""
    lengths = {rank: part.nbytes for rank, part in parts.items()}
    if len(set(lengths.values())) > 1:
        raise RankFailure(f"ranks sum buffers of different lengths: bytes by rank {lengths}")
    wide = needs_widening(dtype)
    total: NDArray[Any] | None = None
    for rank in sorted(parts):
        values = widened(parts[rank], dtype) if wide else summed_view(parts[rank], dtype)
        total = values.copy() if total is None else np.add(total, values, out=total)
    assert total is not None
    for part in parts.values():
        if wide:
            round_into(total, dtype, part)
        else:
            summed_view(part, dtype)[...] = total
