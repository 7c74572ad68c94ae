"""Ranks as threads: rendezvous semantics, deadlocks found at once, sums in one order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmpi.errors import InputError, RankFailure
from pdmpi.transport.local import LocalTransport, LocalWorld


def blocking_exchange(transport: LocalTransport) -> int:
    """Send first, then receive: right only while messages are buffered."""
    peer = 1 - transport.rank
    mine, theirs = np.full(8, transport.rank, np.uint8), np.empty(8, np.uint8)
    transport.post_send(mine, peer, 0, 0).wait()
    transport.post_recv(theirs, peer, 0, 0).wait()
    return int(theirs[0])


def test_sends_that_wait_for_each_other_deadlock_under_rendezvous() -> None:
    with pytest.raises(RankFailure, match=r"deadlock: rank 0 waits to send to rank 1 .*rank 1 waits to send"):
        LocalWorld(2).run(blocking_exchange)


def test_the_same_sends_pass_when_buffered() -> None:
    assert LocalWorld(2, rendezvous=False).run(blocking_exchange) == [1, 0]


def test_a_rank_that_ends_early_leaves_a_deadlock() -> None:
    def main(transport: LocalTransport) -> None:
        if transport.rank == 0:
            transport.post_recv(np.empty(4, np.uint8), 1, 0, 0).wait()

    with pytest.raises(RankFailure, match="rank 0 waits to receive from rank 1"):
        LocalWorld(2).run(main)


def test_an_exception_ends_the_other_ranks_and_is_raised() -> None:
    def main(transport: LocalTransport) -> None:
        if transport.rank == 2:
            raise ZeroDivisionError("boom")
        transport.barrier()

    with pytest.raises(ZeroDivisionError, match="boom"):
        LocalWorld(3).run(main)


def test_a_wait_has_a_deadline() -> None:
    transport = LocalWorld(2, timeout_s=0.05).transport(0)
    with pytest.raises(RankFailure, match=r"waited 0.05 s to receive from rank 1 \(tag 7, stream 1"):
        transport.post_recv(np.empty(3, np.uint8), 1, 7, 1).wait()


@pytest.mark.parametrize("length", [0, 3, 5])
def test_another_length_is_an_error_at_the_receiver(length: int) -> None:
    def main(transport: LocalTransport) -> None:
        if transport.rank == 0:
            transport.post_send(np.zeros(length, np.uint8), 1, 0, 0).wait()
        else:
            with pytest.raises(RankFailure, match=f"4 bytes.* has {length} bytes"):
                transport.post_recv(np.zeros(4, np.uint8), 0, 0, 0).wait()

    LocalWorld(2).run(main)


@settings(max_examples=20, deadline=None)
@given(
    size=st.integers(1, 5), messages=st.integers(1, 6), rendezvous=st.booleans(), seed=st.integers(0, 2**20)
)
def test_messages_keep_their_order_whatever_the_timing(
    size: int, messages: int, rendezvous: bool, seed: int
) -> None:
    def main(transport: LocalTransport) -> None:
        after, before = (transport.rank + 1) % size, (transport.rank - 1) % size
        received = [np.empty(2, np.uint8) for _ in range(2 * messages)]
        requests = []
        for number in range(messages):
            for tag in (0, 1):
                requests.append(transport.post_recv(received[2 * number + tag], before, tag, 0))
        for tag in (1, 0):
            for number in range(messages):
                requests.append(transport.post_send(np.array([tag, number], np.uint8), after, tag, 0))
        for request in requests:
            request.wait()
        expected = [[tag, number] for number in range(messages) for tag in (0, 1)]
        assert [buffer.tolist() for buffer in received] == expected

    LocalWorld(size, rendezvous, seed=seed, jitter_s=1e-5).run(main)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "uint8"])
def test_sums_are_right_and_the_same_on_every_rank(dtype: str) -> None:
    parts = [
        (100 * np.random.default_rng(rank).random(1000)).astype(dtype).view(np.uint8) for rank in range(3)
    ]
    exact = sum(part.view(dtype).astype(np.float64) for part in parts)

    def main(transport: LocalTransport) -> bytes:
        transport.prepare([[0, 1, 2]], [dtype])
        buffer = parts[transport.rank].copy()
        transport.bind_allreduce(buffer, dtype, [0, 1, 2]).post().wait()
        return buffer.tobytes()

    results = LocalWorld(3, seed=3).run(main)
    assert len(set(results)) == 1
    found = np.frombuffer(results[0], dtype).astype(np.float64)
    if dtype == "uint8":
        exact = np.mod(exact, 256)
    np.testing.assert_allclose(found, exact, rtol={"float16": 1e-3, "float32": 1e-6}.get(dtype, 1e-14))


def test_only_prepared_groups_and_known_dtypes_are_summed() -> None:
    def main(transport: LocalTransport) -> None:
        with pytest.raises(InputError, match="no prepared group"):
            transport.post_allreduce(np.zeros(4, np.uint8), "float32", [0, 1])
        with pytest.raises(InputError, match="float8_e4m3fn"):
            transport.prepare([[0, 1]], ["float8_e4m3fn"])

    LocalWorld(2).run(main)


def test_sums_of_different_lengths_fail_on_every_rank() -> None:
    def main(transport: LocalTransport) -> None:
        transport.prepare([[0, 1]])
        buffer = np.zeros(4 + 4 * transport.rank, np.uint8)
        with pytest.raises(RankFailure, match="different lengths"):
            transport.post_allreduce(buffer, "float32", [0, 1]).wait()

    LocalWorld(2).run(main)


def test_control_messages() -> None:
    def main(transport: LocalTransport) -> tuple[bytes, list[bytes]]:
        return transport.broadcast(b"from %d" % transport.rank, 1), transport.gather(bytes([transport.rank]))

    first, second = LocalWorld(2, seed=1).run(main)
    assert first == (b"from 1", [b"\0", b"\1"])
    assert second == (b"from 1", [])
