"""When a GPU ran what a rank's instructions launched; the host's clock tells only when they were launched."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["DeviceClock"]


class DeviceClock:
    """Marks on the stream that computes, read when the program has run.

    Events are kept from program to program: making one takes longer than recording it.
    """

    def __init__(self) -> None:
        self._events: list[Any] = []
        self._origin: Any = _event()
        self._used = 0

    def begin(self) -> None:
        """Start counting seconds, with the device idle."""
        torch.cuda.synchronize()
        self._origin.record()
        self._used = 0

    def mark(self) -> None:
        """Mark the point of the stream that has been reached by launching."""
        if self._used == len(self._events):
            self._events.append(_event())
        self._events[self._used].record()
        self._used += 1

    def marks_s(self) -> list[float]:
        """Return the seconds at each mark, in order; the device has run all of them."""
        return [self._origin.elapsed_time(event) / 1e3 for event in self._events[: self._used]]


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
