"""Streams and events of the stand-in."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any

_pointers = itertools.count(1)
_streams: dict[int, Stream] = {}


class Stream:
    """Runs what is queued on it, in order, in a thread of its own."""

    def __init__(self, non_blocking: bool = False) -> None:
        self.ptr = next(_pointers)
        _streams[self.ptr] = self
        self._calls: queue.Queue[Callable[[], Any]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._calls.get()()
            self._calls.task_done()

    def enqueue(self, call: Callable[[], Any]) -> None:
        self._calls.put(call)

    def wait_event(self, event: Event) -> None:
        self.enqueue(event.last.wait)

    def synchronize(self) -> None:
        self._calls.join()

    @property
    def done(self) -> bool:
        return self._calls.unfinished_tasks == 0


def external_stream(pointer: int) -> Stream:
    return _streams[pointer]


def synchronize_all() -> None:
    for stream in list(_streams.values()):
        stream.synchronize()


class Event:
    """Done when all that was queued before its last record is."""

    def __init__(self, disable_timing: bool = False) -> None:
        self.last = threading.Event()
        self.last.set()

    def record(self, stream: Stream) -> None:
        self.last = threading.Event()
        stream.enqueue(self.last.set)

    @property
    def done(self) -> bool:
        return self.last.is_set()
