"""Signals and the time limit: when a run is asked to stop.

A Python signal handler runs between two byte codes of the main thread, and so not at all
while that thread is blocked in MPI.  The interpreter's C handler does run, and writes the
signal's number to a pipe (`signal.set_wakeup_fd`); a thread reads the pipe.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType

__all__ = ["StopRequest"]


class StopRequest:
    """Notes that the run was asked to stop; the trainer asks for `reason` when the pipeline is drained.

    Used as a context manager, on the main thread: handlers are put back at its end.

    Parameters
    ----------
    signals
        Names without the ``SIG``.
    deadline_unix_s
        When the job's time limit ends it, or None.
    margin_s
        Seconds to spare before that.
    notice
        Called from a thread, at once, with one line for each signal that comes.
    """

    def __init__(
        self,
        signals: Iterable[str],
        *,
        deadline_unix_s: float | None = None,
        margin_s: float = 0.0,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._signals = tuple(signal.Signals[f"SIG{name}"] for name in signals)
        self._deadline = deadline_unix_s
        self._margin_s = margin_s
        self._notice = notice
        self._received = ""
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._owner = os.getpid()
        self._previous_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._handle)
        os.register_at_fork(after_in_child=self._forget)
        self._thread = threading.Thread(target=self._read, name="stop-request", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        for number in self._signals:
            signal.signal(number, self._previous[number])  # type: ignore[arg-type]
        os.close(self._write_end)
        self._thread.join()
        os.close(self._read_end)
        self._owner = -1

    def reason(self, needed_s: float = 0.0) -> str:
        """Return why the run should stop, or an empty text.

        Parameters
        ----------
        needed_s
            Seconds that pass until the next chance to stop, and that a checkpoint then takes.
        """
        if self._received:
            return self._received
        if self._deadline is not None and time.time() + needed_s + self._margin_s >= self._deadline:
            left = max(0.0, self._deadline - time.time())
            return f"the job's time limit is {left:.0f} s away"
        return ""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Keep the default action away; the thread does the rest."""

    def _read(self) -> None:
        while numbers := os.read(self._read_end, 64):
            for number in numbers:
                if number in self._signals:
                    name = signal.Signals(number).name
                    again = " again" if self._received else ""
                    self._received = self._received or name
                    self._notice(f"received {name}{again}")

    def _forget(self) -> None:
        """Give a forked child (a data loader's worker) its signals back: they are not for us."""
        if self._owner != -1:
            signal.set_wakeup_fd(-1)
            for number in self._signals:
                signal.signal(number, signal.SIG_DFL)
