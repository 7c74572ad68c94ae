"""Signs of life round a ring of ranks, so that a silent one is noticed while it owes no message.

MPI never notices a host that is gone or a link that is cut: transfers hang.  A slow stage
makes them wait as well, so that a time limit for transfers must be long; one for signs of
life may be short.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from pdmpi.errors import PdmpiError, RankFailure

__all__ = ["Heart", "Heartbeat"]

_INTERVAL_S = 0.5
_LATE = 4
"""Intervals after which this rank was itself not running (suspended with its job): it listens anew."""


class Heart(Protocol):
    """Sends signs of life to the next rank, and takes those of the one before."""

    def beat(self) -> None:
        """Send one, unless the last one is still on its way."""

    def heard(self) -> bool:
        """Tell whether any has come since the last call, without waiting."""


class Heartbeat:
    """A thread that gives and expects signs of life; a context manager.

    Parameters
    ----------
    heart
        Sends and takes them, from a thread of its own.
    timeout_s
        Silence after which the rank before this one counts as gone.
    name
        Names that rank in the message.
    fail
        Called once, from the thread, with what went wrong.
    meet
        Waits for all ranks at an orderly end: who has left the ring is silent.
    """

    def __init__(
        self,
        heart: Heart,
        timeout_s: float,
        *,
        name: Callable[[], str],
        fail: Callable[[PdmpiError], None],
        meet: Callable[[], None],
    ) -> None:
        self._heart = heart
        self._timeout_s = timeout_s
        self._name = name
        self._fail = fail
        self._meet = meet
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._meet()
        finally:
            self._ended.set()
            self._thread.join()

    def _run(self) -> None:
        try:
            self._live()
        except Exception as error:
            self._fail(RankFailure(f"the heartbeat of this rank failed: {type(error).__name__}: {error}"))

    def _live(self) -> None:
        heard_s = looked_s = time.monotonic()
        while not self._ended.is_set():
            now = time.monotonic()
            if self._heart.heard() or now - looked_s > _LATE * _INTERVAL_S:
                heard_s = now
            if now - heard_s > self._timeout_s:
                self._fail(
                    RankFailure(
                        f"{self._name()} gave no sign of life for {self._timeout_s:g} s: it, its host or a "
                        "link hangs, or [runtime] silence_timeout_s is too short"
                    )
                )
                return
            self._heart.beat()
            looked_s = now
            self._ended.wait(_INTERVAL_S)
