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


@given(lives(), st.integers(0, 5), st.booleans(), st.booleans())
def test_allocation(life, least, ahead, restarts):
    acquire, release = life
    found = allocate(acquire, release, least=least, ahead=ahead, restarts=restarts)
    assert found.count == allocate(acquire, release, least=least, ahead=ahead).count
    num, last = len(acquire), -1
    alive = [int(((acquire <= t) & (release >= t)).sum()) for t in acquire]
    fewest = max(alive, default=0)
    assert min(max(fewest, least), num) <= found.count <= max(fewest, min(least, num)) + ahead
    for i in np.argsort(acquire):
        assert 0 <= found.slot[i] < found.count
        others = [
            j for j in range(num) if j != i and found.slot[j] == found.slot[i] and acquire[j] < acquire[i]
        ]
        assert all(release[j] < acquire[i] for j in others)
        freed = max((release[j] for j in others), default=-1)
        last = max(last, freed)
        assert found.free_after[i] == last, "receives are posted in order"
        assert found.restarts or last == freed
        if ahead and others and found.count > fewest:
            assert acquire[i] - found.free_after[i] >= 1


@given(st.integers(1, 6), st.integers(1, 9), st.integers(2, 4))
def test_a_schedule_that_flushes_repeats_its_slots(depth, microbatches, times):
    """1F1B: so many forwards, then a backward and a forward in turn, and backwards again; several times."""
    depth = min(depth, microbatches)
    steady = microbatches - depth
    order = ["F"] * depth + ["B", "F"] * steady + ["B"] * depth
    forward = np.array([i for i, letter in enumerate(order * times) if letter == "F"])
    backward = np.array([i for i, letter in enumerate(order * times) if letter == "B"])
    found = allocate(forward, backward, restarts=True)
    assert found.slot.tolist() == [i % depth for i in range(microbatches)] * times


def test_one_slot_more_lets_a_receive_be_posted_a_computation_ahead():
    forward, backward = np.array([0, 2, 4]), np.array([1, 3, 5])
    assert allocate(forward, backward).count == 1
    found = allocate(forward, backward, ahead=True)
    assert found.count == 2
    assert found.free_after.tolist() == [-1, -1, 1]


def test_no_slot_more_where_a_receive_is_early_enough_anyway():
    forward, backward = np.array([0, 3, 6]), np.array([1, 4, 7])
    assert allocate(forward, backward, ahead=True).count == 1
