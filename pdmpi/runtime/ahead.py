"""Reads data ahead of the thread that trains, into pinned memory that a GPU copies from by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import Queue
from typing import Any

__all__ = ["read_ahead"]

_AHEAD = 2


def read_ahead(read: Callable[[int], Any], numbers: Iterable[int]) -> Callable[[int], Any]:
    """Return ``read``, to be called with these numbers in this order, done beforehand by another thread."""
    found: Queue[tuple[Any, BaseException | None]] = Queue(_AHEAD)

    def run() -> None:
        for number in numbers:
            try:
                found.put((read(number), None))
            except BaseException as error:  # raised where it is waited for
                found.put((None, error))
                return

    thread = threading.Thread(target=run, name="data", daemon=True)

    def take(number: int) -> Any:
        if thread.ident is None:
            thread.start()
        value, error = found.get()
        if error is not None:
            raise error
        return value

    return take
