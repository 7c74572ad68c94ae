"""``extra_in_flight = "auto"`` finds the fewest minibatches in flight that lose nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmpi.errors import InputError
from pdmpi.schedule.auto import fewest_in_flight


@given(st.integers(0, 100), st.integers(0, 100))
def test_the_fewest_that_reach_the_full_throughput(needed, limit):
    asked = []

    def evaluate(extra: int) -> float:
        asked.append(extra)
        return 100.0 * min(extra + 1, needed + 1)

    found = fewest_in_flight(evaluate, limit, tolerance=0.0)
    assert found == min(needed, limit)
    assert len(asked) <= 2 + limit.bit_length()
    assert all(0 <= extra <= limit for extra in asked)


def test_a_little_is_given_up_for_fewer():
    assert fewest_in_flight(lambda extra: [98.0, 99.5, 100.0][extra], 2) == 1


def test_a_plan_that_does_not_fit():
    with pytest.raises(InputError, match="does not fit the memory"):
        fewest_in_flight(lambda _: 1.0, -1)
