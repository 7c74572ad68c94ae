"""Slots are never shared by two items alive at once, and no more are taken than needed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pdmpi.schedule.slots import allocate


@st.composite
def lives(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    num = draw(st.integers(0, 20))
    positions = draw(st.permutations(range(2 * num)))
    pairs = [sorted(positions[2 * i : 2 * i + 2]) for i in range(num)]
    return np.array([a for a, _ in pairs], np.int64), np.array([b for _, b in pairs], np.int64)


@given(lives(), st.integers(0, 5), st.booleans())
def test_allocation(life, least, ahead):
    acquire, release = life
    found = allocate(acquire, release, least=least, ahead=ahead)
    num = len(acquire)
    alive = [int(((acquire <= t) & (release >= t)).sum()) for t in acquire]
    fewest = max(alive, default=0)
    assert min(max(fewest, least), num) <= found.count <= max(fewest, min(least, num)) + ahead
    for i in range(num):
        assert 0 <= found.slot[i] < found.count
        others = [
            j for j in range(num) if j != i and found.slot[j] == found.slot[i] and acquire[j] < acquire[i]
        ]
        assert all(release[j] < acquire[i] for j in others)
        assert found.free_after[i] == max((release[j] for j in others), default=-1)
        if ahead and others and found.count > fewest:
            assert acquire[i] - found.free_after[i] >= 1


def test_one_slot_more_lets_a_receive_be_posted_a_computation_ahead():
    forward, backward = np.array([0, 2, 4]), np.array([1, 3, 5])
    assert allocate(forward, backward).count == 1
    found = allocate(forward, backward, ahead=True)
    assert found.count == 2
    assert found.free_after.tolist() == [-1, -1, 1]


def test_no_slot_more_where_a_receive_is_early_enough_anyway():
    forward, backward = np.array([0, 3, 6]), np.array([1, 4, 7])
    assert allocate(forward, backward, ahead=True).count == 1
