"""``extra_in_flight = "auto"``: as few minibatches in flight as keep the bottleneck busy."""

from __future__ import annotations

from collections.abc import Callable

from pdmpi.errors import InputError

__all__ = ["fewest_in_flight"]


def fewest_in_flight(evaluate: Callable[[int], float], limit: int, tolerance: float = 0.01) -> int:
    """Return the smallest number of extra minibatches in flight that gives the full throughput.

    Parameters
    ----------
    evaluate
        Returns the throughput (samples per second) with so many extra minibatches in
        flight, from the simulator; it must not fall as they grow.
    limit
        The most that memory allows.
    tolerance
        Part of the throughput at ``limit`` that is given up for fewer in flight.

    Returns
    -------
    int
        Between 0 and ``limit``; found in O(log limit) evaluations.
    """
    if limit < 0:
        raise InputError(f"schedule.extra_in_flight at most {limit}: the plan does not fit the memory at all")
    enough = (1 - tolerance) * evaluate(limit)
    low, high = 0, limit
    while low < high:
        middle = (low + high) // 2
        if evaluate(middle) >= enough:
            high = middle
        else:
            low = middle + 1
    return high
