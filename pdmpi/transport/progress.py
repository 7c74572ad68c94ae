"""Waiting without taking the core, and progress while nobody waits.

MPI moves large messages (rendezvous, TCP) only while some thread calls it.  The thread
that computes calls it when it posts and waits; in between a second thread does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pdmpi.errors import PdmpiError

__all__ = ["MEETING_PATIENCE", "Progress"]

MEETING_PATIENCE = 10
"""Stall timeouts that a rank waits for others to come to a barrier, broadcast or gather."""

_MIN_SLEEP_S = 20e-6
_ASIDE_SLEEP_S = 500e-6
_ASIDE_FACTOR = 4
"""The second thread looks a wait's longest sleep after a start, half a millisecond at most, if at its last
look a request was on its way and nobody waited; the longer it has found otherwise, the later, up to a
transport's own limit.  Further looks are rarer and rarer, down to once in so many longest sleeps of a
wait.  Each takes the interpreter from the first thread."""
_BACKOFF = 0.02
"""A wait sleeps for this part of the time that it has waited: a message over TCP takes hundreds of steps."""
_MOVING_S = 10e-6
"""A poll that works for so long (of its own processor time) has moved data; an idle one takes 1-4 µs."""


class Progress:
    """Counts outstanding requests of one thread, and lets them progress from another.

    Parameters
    ----------
    poke
        Lets all outstanding requests progress; called by the second thread.  None when
        the library may be called by one thread only.
    stall_timeout_s
        Longest wait for one request, in seconds; `MEETING_PATIENCE` times as long where ranks meet.
    spin_s
        How long a wait tests without sleeping.
    max_sleep_s
        Longest sleep between two tests.
    max_aside_s
        Longest sleep of the second thread after a start.
    on_thread
        Called by the second thread before all else.
    """

    def __init__(
        self,
        poke: Callable[[], object] | None,
        stall_timeout_s: float,
        *,
        spin_s: float = 50e-6,
        max_sleep_s: float = 1e-3,
        max_aside_s: float = _ASIDE_SLEEP_S,
        on_thread: Callable[[], object] = lambda: None,
    ) -> None:
        self.stall_timeout_s = stall_timeout_s
        self._poke = poke
        self._spin_s = spin_s
        self._max_sleep_s = max_sleep_s
        self._max_aside_s = max_aside_s
        self._on_thread = on_thread
        self._outstanding = 0
        self._wanted = threading.Event()
        self._parked = False
        self._waiting = False
        self._ended = poke is None
        self._failure: PdmpiError | None = None
        self._first_sleep_s = self._sleep_s = min(_ASIDE_SLEEP_S, max_sleep_s)
        self._thread = threading.Thread(target=self._run, name="transport progress", daemon=True)
        self._thread.start()

    def started(self) -> None:
        """Count a request that was started."""
        self._outstanding += 1
        self._sleep_s = self._first_sleep_s
        if self._parked:  # set before the thread looks at the count, which is set before this: one sees it
            self._parked = False
            self._wanted.set()

    def limit_s(self, meeting: bool) -> float:
        """Return the longest wait; where ranks meet, another may be reading data or writing a file."""
        return self.stall_timeout_s * (MEETING_PATIENCE if meeting else 1)

    def nothing_came(self, meeting: bool) -> str:
        """Return what to say after a wait that was too long, and which knob allows a longer one."""
        return (
            f"nothing for {self.limit_s(meeting):g} s: a rank, host or link hangs, or is slower than "
            f"[runtime] stall_timeout_s = {self.stall_timeout_s:g} allows"
            + (f" ({MEETING_PATIENCE} times that where ranks meet)" if meeting else "")
        )

    def wait(
        self, test: Callable[[], bool], stalled: Callable[[], PdmpiError], meeting: bool = False
    ) -> None:
        """Block until ``test`` says that a started request is done.

        Raises
        ------
        PdmpiError
            What ``stalled`` returns, after `limit_s`.
        """
        if not test():
            self._waiting = True
            try:
                self._poll(test, stalled, self.limit_s(meeting))
            finally:
                self._waiting = False
        self._outstanding -= 1

    def fail(self, error: PdmpiError) -> None:
        """Let the present wait, or the next one that finds its request not done, raise an error."""
        self._failure = self._failure or error

    def end(self) -> None:
        """End the thread."""
        self._ended = True
        self._wanted.set()
        self._thread.join()

    def _poll(self, test: Callable[[], bool], stalled: Callable[[], PdmpiError], limit_s: float) -> None:
        begin = time.monotonic()
        while True:
            if test():
                return
            if self._failure is not None:
                raise self._failure
            waited = time.monotonic() - begin
            if waited < self._spin_s:
                continue
            if waited > limit_s:
                raise stalled()
            time.sleep(min(max(_BACKOFF * waited, _MIN_SLEEP_S), self._max_sleep_s))

    def _run(self) -> None:
        try:
            self._move()
        except Exception as error:
            self.fail(PdmpiError(f"the thread that moves messages failed: {type(error).__name__}: {error}"))

    def _move(self) -> None:
        self._on_thread()
        shortest_s = sleep_s = self._first_sleep_s
        while not self._ended:
            if self._outstanding == 0:
                self._wanted.clear()
                self._parked = True
                if self._outstanding == 0 and not self._ended:
                    self._wanted.wait()
                self._parked = False
                sleep_s = self._sleep_s
            time.sleep(sleep_s)
            sleep_s = self._sleep_s
            self._sleep_s = min(2 * sleep_s, _ASIDE_FACTOR * self._max_sleep_s)
            is_needed = self._outstanding > 0 and not self._waiting
            self._first_sleep_s = shortest_s if is_needed else min(2 * self._first_sleep_s, self._max_aside_s)
            if is_needed and self._poke is not None:
                begin = time.thread_time()
                self._poke()
                if time.thread_time() - begin > _MOVING_S:
                    sleep_s = self._sleep_s = _MIN_SLEEP_S
