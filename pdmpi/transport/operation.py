"""Operations that start at once or when their buffer is ready, and are waited for patiently.

Nothing here knows the library that carries them out.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from pdmpi.errors import PdmpiError, RankFailure
from pdmpi.transport.progress import Progress

__all__ = ["Operation", "OperationOwner"]


class OperationOwner:
    """What a transport's operations share: who they belong to, their waiting, and their queue.

    Parameters
    ----------
    rank
        The rank whose operations these are.
    """

    progress: Progress

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.describe: Callable[[int], str] = "rank {}".format
        """Names a rank in messages; the runtime adds stage, host and process id."""
        self.deferred: deque[tuple[Operation, Callable[[], bool]]] = deque()
        self._lock = threading.Lock()

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    def defer(self, operation: Operation, ready: Callable[[], bool]) -> None:
        """Start an operation once its buffer is ready, after those deferred before."""
        with self._lock:
            self.deferred.append((operation, ready))

    def start_ready(self) -> None:
        """Start what is ready; called by either thread."""
        with self._lock:
            while self.deferred and self.deferred[0][1]():
                self.deferred.popleft()[0].start()

    def reason(self, error: RuntimeError) -> str:
        """Return what the library means by an error."""
        return str(error)


class Operation:
    """Something that a library does, once or again and again; started at once or when its buffer is ready."""

    meeting = False
    """Whether it waits for a rank to come to where ranks meet, and not for a message of the program."""

    def __init__(self, owner: OperationOwner) -> None:
        self._owner = owner
        self._active = False
        self._started = False
        self._error: RankFailure | None = None

    def post(self) -> Operation:
        """Start it (again)."""
        self._activate()
        self.start()
        return self

    def post_when(self, ready: Callable[[], bool]) -> Operation:
        """Start it (again) once ``ready()`` says so; such operations start in the order of their posting."""
        self._activate()
        self._owner.defer(self, ready)
        self._owner.start_ready()
        return self

    def wait(self) -> None:
        """Block until it is done."""
        if self._active:
            self._owner.progress.wait(self._test, self._stalled, self.meeting)
            self._active = False
            self._finish()

    def start(self) -> None:
        """Make the library's calls that start it; called by either thread."""
        try:
            self._start()
        except RuntimeError as error:
            self._error = self._failed(self._owner.reason(error))
        self._started = True

    def _activate(self) -> None:
        assert not self._active, f"posted again before it was waited for: {self._what()}"
        self._active = True
        self._started = False
        self._owner.progress.started()

    def _test(self) -> bool:
        if self._owner.deferred:
            self._owner.start_ready()
        if not self._started:
            return False
        if self._error is not None:
            raise self._error
        try:
            return self._done()
        except RuntimeError as error:
            raise self._failed(self._owner.reason(error)) from error

    def _stalled(self) -> PdmpiError:
        return self._failed(self._owner.progress.nothing_came(self.meeting))

    def _failed(self, cause: str) -> RankFailure:
        return RankFailure(f"{self._owner.describe(self._owner.rank)} could not {self._what()}: {cause}")

    def _start(self) -> None:
        raise NotImplementedError

    def _done(self) -> bool:
        raise NotImplementedError

    def _finish(self) -> None:
        """Use the result, after it is done."""

    def _what(self) -> str:
        raise NotImplementedError
