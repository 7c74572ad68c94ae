"""Run by every rank of a job: checks of `MpiTransport`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import numpy as np
import pytest
from job_checks import run_checks

from pdmpi.errors import InputError, PdmpiError, RankFailure
from pdmpi.transport.base import Bytes
from pdmpi.transport.mpi import MpiTransport

CHECKS: list[Callable[[MpiTransport], object]] = []

DTYPES = ("float32", "float64", "bfloat16", "float16", "int8", "uint8", "int16", "int32", "int64")


def check(function: Callable[[MpiTransport], object]) -> Callable[[MpiTransport], object]:
    CHECKS.append(function)
    return function


def exchange(transport: MpiTransport, size: int, tag: int, stream: int, repeats: int) -> None:
    """Pass buffers round a ring, bound once, changing each time."""
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    mine, theirs = np.empty(size, np.uint8), np.empty(size, np.uint8)
    receive = transport.bind_recv(theirs, before, tag, stream)
    send = transport.bind_send(mine, after, tag, stream)
    for number in range(repeats):
        mine[...] = (transport.rank + number) % 251
        theirs[...] = 255
        arriving, leaving = receive.post(), send.post()
        arriving.wait()
        leaving.wait()
        assert (theirs == (before + number) % 251).all(), (size, number)


@check
def messages_of_every_size(transport: MpiTransport) -> None:
    for size in (0, 1, 7, 4096, 65_537, 1 << 20, 5_000_001):
        exchange(transport, size, tag=3, stream=0, repeats=5)


@check
def long_messages_go_in_parts(transport: MpiTransport) -> None:
    everyone = range(transport.size)
    transport.prepare([everyone])
    usual, transport.max_message_bytes = transport.max_message_bytes, 1000
    exchange(transport, 12_345, tag=0, stream=1, repeats=3)
    x = np.full(700, transport.rank + 1.0)
    transport.post_allreduce(x.view(np.uint8), "float64", everyone).wait()
    assert (x == transport.size * (transport.size + 1) / 2).all()
    text = bytes(range(256)) * 20
    assert transport.broadcast(text if transport.rank == 0 else b"") == text
    transport.max_message_bytes = usual


@check
def order_is_kept_within_tag_and_stream(transport: MpiTransport) -> None:
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    count = 20
    received = {key: [np.empty(1, np.uint8) for _ in range(count)] for key in ((0, 0), (1, 0), (0, 1))}
    sent = [np.array([number], np.uint8) for number in range(count)]
    requests = [
        transport.post_recv(buffer, before, *key) for key, buffers in received.items() for buffer in buffers
    ]
    for key in reversed(received):
        requests += [transport.post_send(buffer, after, *key) for buffer in sent]
    for request in reversed(requests):
        request.wait()
    for buffers in received.values():
        assert [int(buffer[0]) for buffer in buffers] == list(range(count))


@check
def large_sends_need_no_receive_to_be_posted_first(transport: MpiTransport) -> None:
    """Posting, unlike a blocking send, never deadlocks on rendezvous."""
    peer = transport.size - 1 - transport.rank
    mine, theirs = np.full(1 << 22, transport.rank, np.uint8), np.empty(1 << 22, np.uint8)
    send = transport.post_send(mine, peer, 0, 0)
    transport.post_recv(theirs, peer, 0, 0).wait()
    send.wait()
    assert (theirs == peer).all()


@check
def a_transfer_progresses_while_both_compute(transport: MpiTransport) -> None:
    """The whole message is there although neither rank has called anything since it was posted."""
    peer = transport.rank ^ 1
    begin = time.perf_counter()
    if peer < transport.size:
        mine, theirs = np.zeros(1 << 25, np.uint8), np.ones(1 << 25, np.uint8)
        arriving, leaving = transport.post_recv(theirs, peer, 0, 0), transport.post_send(mine, peer, 0, 0)
        while theirs.any() and time.perf_counter() - begin < 20:
            time.sleep(0.01)
        arrived = not theirs.any()
        arriving.wait()
        leaving.wait()
        assert arrived
    transport.barrier()


def wrong_length(transport: MpiTransport, length: int) -> str:
    """Return the receiver's error when ``length`` bytes are sent where 10 are expected."""
    message = ""
    if transport.rank == 0:
        try:
            transport.post_recv(np.empty(10, np.uint8), 1, 9, 0).wait()
        except RankFailure as error:
            message = str(error)
        assert "rank 0 could not receive 10 bytes (tag 9), peer rank 1" in message, message
    elif transport.rank == 1:
        transport.post_send(np.empty(length, np.uint8), 0, 9, 0).wait()
    return message


@check
def a_short_message_is_an_error(transport: MpiTransport) -> None:
    message = wrong_length(transport, 8)
    assert transport.rank or "8 bytes" in message


@check
def a_long_message_is_an_error(transport: MpiTransport) -> None:
    message = wrong_length(transport, 12)
    assert transport.rank or "truncat" in message


@check
def a_silent_peer_is_named(transport: MpiTransport) -> None:
    usual, transport.progress.stall_timeout_s = transport.progress.stall_timeout_s, 0.2
    if transport.rank == 0:
        receive = transport.post_recv(np.empty(10, np.uint8), 1, 11, 0)
        with pytest.raises(RankFailure, match=r"peer rank 1: nothing for 0.2 s"):
            receive.wait()
    transport.progress.stall_timeout_s = usual
    transport.broadcast(b"named")
    if transport.rank == 0:
        receive.wait()
    elif transport.rank == 1:
        transport.post_send(np.empty(10, np.uint8), 0, 11, 0).wait()
    transport.barrier()


@check
def dtypes_are_tried_on_known_values(transport: MpiTransport) -> None:
    everyone, pairs = range(transport.size), [[0, 1], [1], [transport.size - 1, 0]]
    transport.prepare([everyone, *pairs], DTYPES)
    transport.prepare([everyone], ["float32"])


@check
def groups_must_agree(transport: MpiTransport) -> None:
    with pytest.raises(PdmpiError, match="prepare other groups or dtypes than rank 0"):
        transport.prepare([[transport.rank]])
    with pytest.raises(InputError, match="no prepared group"):
        transport.post_allreduce(np.zeros(4, np.uint8), "float32", [5, 6])


def random_values(rank: int, size: int, dtype: str) -> Bytes:
    """Values whose sum depends on the order in which they are added."""
    random = np.random.default_rng([rank, size])
    values = random.standard_normal(size) * 10.0 ** random.integers(-3, 4, size)
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(dtype).view(np.uint8)


@check
def sums_are_bitwise_the_same_everywhere(transport: MpiTransport) -> None:
    everyone = range(transport.size)
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        for size in (1, 17, 1000, 100_003, 400_000):
            buffer = random_values(transport.rank, size, dtype)
            bound = transport.bind_allreduce(buffer, dtype, everyone)
            for _ in range(2):
                bound.post().wait()
            digests = transport.gather(hashlib.sha256(buffer.tobytes()).digest())
            assert len(set(digests)) <= 1, (dtype, size)


@check
def sums_are_right(transport: MpiTransport) -> None:
    everyone = range(transport.size)
    for dtype, tolerance in (("float32", 1e-5), ("float64", 1e-13), ("float16", 1e-3)):
        buffer = random_values(transport.rank, 1000, dtype)
        parts = [random_values(rank, 1000, dtype).view(dtype).astype(np.float64) for rank in everyone]
        transport.post_allreduce(buffer, dtype, everyone).wait()
        scale = np.sum(np.abs(parts), axis=0) + 1e-3
        assert (np.abs(buffer.view(dtype) - np.sum(parts, axis=0)) <= tolerance * scale).all(), dtype


@check
def sums_of_groups_and_messages_mix(transport: MpiTransport) -> None:
    """A group's sum and its members' messages are under way at the same time."""
    group = [0, 1]
    x = np.full(200_000, transport.rank + 1.0, np.float32)
    total = transport.post_allreduce(x.view(np.uint8), "float32", group) if transport.rank < 2 else None
    exchange(transport, 300_000, tag=5, stream=1, repeats=3)
    if total is not None:
        total.wait()
        assert (x == 3).all()


@check
def control_messages(transport: MpiTransport) -> None:
    for length in (0, 1, 100_000):
        mine = bytes([transport.rank]) * (length + transport.rank)
        root = transport.size - 1
        found = transport.gather(mine, root)
        expected = [bytes([rank]) * (length + rank) for rank in range(transport.size)]
        assert found == (expected if transport.rank == root else [])
        assert transport.broadcast(mine, root) == expected[root]
    transport.barrier()


@check
def requests_do_not_pile_up(transport: MpiTransport) -> None:
    """The process does not grow while transfers are repeated or bound anew."""

    def resident_kib() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4

    for _ in range(3):
        exchange(transport, 100, tag=0, stream=0, repeats=200)
    before = resident_kib()
    for _ in range(100):
        exchange(transport, 100, tag=0, stream=0, repeats=20)
    grown = resident_kib() - before
    assert grown < 1024, grown


if __name__ == "__main__":
    run_checks(CHECKS, MpiTransport(stall_timeout_s=20))
