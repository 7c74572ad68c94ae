"""Slots for things that live for a while: the fewest that do, given in the order they fall free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Allocation", "allocate"]

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Allocation:
    """Slots of a number of items.

    Attributes
    ----------
    count
        Slots in all.
    slot
        Slot of each item.
    free_after
        Position of the release by which the slots of an item and of all items before it are free; -1 where
        none was used before.
    restarts
        Whether slots are handed out from the first one on again wherever none is in use.
    """

    count: int
    slot: Positions
    free_after: Positions
    restarts: bool = False


def allocate(
    acquire: Positions, release: Positions, *, least: int = 0, ahead: bool = False, restarts: bool = False
) -> Allocation:
    """Give every item a slot that no item alive at the same time has.

    Parameters
    ----------
    acquire, release
        Positions from and to which each item needs its slot.  An item that is released at
        another's acquisition still needs its own slot.
    least
        Slots to have at least.
    ahead
        Whether each slot must be free a computation before it is needed, so that it can be
        received into meanwhile; takes one slot more where that is not so anyway.
    restarts
        Whether slots are handed out from the first one on again wherever none is in use, unless one would
        then be free too late: a schedule that flushes repeats itself, and should do so on the same slots.
    """
    num = len(acquire)
    first = np.argsort(acquire, kind="stable")
    starts = acquire[first]
    ends = release[first]
    order = np.argsort(ends, kind="stable")
    freed = ends[order]
    alive = np.arange(1, num + 1) - np.searchsorted(freed, starts)
    count = max(int(alive.max(initial=0)), least)
    if ahead and count < num and bool((starts[count:] - freed[: num - count] < 2).any()):
        count += 1
    count = min(count, num)
    taken = np.arange(num)
    free = np.full(num, -1, np.int64)
    if count:
        taken = _handed_on(taken, order, count)
        free[count:] = freed[: num - count]
    if restarts and count:
        again = _restarting(ends, np.flatnonzero(alive == 1), count)
        free_again = _last_release(again, ends)
        restarts = not ahead or bool((starts - free_again >= np.minimum(starts - free, 2)).all())
        if restarts:
            taken, free = again, free_again
    slot, free_after = np.empty(num, np.int64), np.empty(num, np.int64)
    slot[first], free_after[first] = taken, free
    return Allocation(count, slot, free_after, restarts)


def _restarting(ends: Positions, begins: Positions, count: int) -> Positions:
    """Return the slots when every run of items, from where it begins, takes them from the first one on."""
    runs = [np.argsort(run, kind="stable") for run in np.split(ends, begins[1:])]
    return np.concatenate([_handed_on(np.arange(len(run)), run, count) for run in runs])


def _last_release(slots: Positions, ends: Positions) -> Positions:
    """Return the last release of each item's slot before, or of those of the items before it."""
    by_slot = np.argsort(slots, kind="stable")
    follows = slots[by_slot][1:] == slots[by_slot][:-1]
    found = np.full(len(slots), -1, np.int64)
    found[by_slot[1:][follows]] = ends[by_slot[:-1][follows]]
    return np.maximum.accumulate(found)


def _handed_on(index: Positions, order: Positions, count: int) -> Positions:
    """Return the slots when item ``i`` takes over the slot of the ``i - count``-th release."""
    if np.array_equal(order, index):
        return index % count
    slots = index.tolist()
    for i, giver in enumerate(order[: max(len(slots) - count, 0)].tolist(), start=count):
        slots[i] = slots[giver]
    return np.array(slots, np.int64)
