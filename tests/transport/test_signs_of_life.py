"""What helper threads notice reaches the thread that waits: a silent rank, a failure of their own."""

from __future__ import annotations

import threading

import pytest

from pdmpi.errors import PdmpiError, RankFailure
from pdmpi.transport.heartbeat import Heartbeat
from pdmpi.transport.progress import Progress


class Heart:
    """The end of a ring whose other ranks speak or not, or whose library fails."""

    def __init__(self, speaks: bool = True, error: Exception | None = None) -> None:
        self._speaks, self._error = speaks, error
        self.beats = 0
        self.lived = threading.Event()

    def beat(self) -> None:
        if self._error:
            raise self._error
        self.beats += 1
        if self.beats == 4:
            self.lived.set()

    def heard(self) -> bool:
        return self._speaks


def told_by(heart: Heart, until: threading.Event | None = None) -> list[PdmpiError]:
    """Return what a heartbeat tells until something is told, or an event."""
    told: list[PdmpiError] = []
    happened = until or threading.Event()

    def fail(error: PdmpiError) -> None:
        told.append(error)
        happened.set()

    met: list[str] = []
    with Heartbeat(heart, 0.7, name=lambda: "rank 2 (stage 1)", fail=fail, meet=lambda: met.append("all")):
        assert happened.wait(120)
    assert met == ["all"]
    return told


def test_a_silent_rank_is_told_once() -> None:
    (error,) = told_by(Heart(speaks=False))
    assert isinstance(error, RankFailure)
    assert str(error).startswith("rank 2 (stage 1) gave no sign of life for 0.7 s")


def test_ranks_that_speak_are_left_alone() -> None:
    heart = Heart()
    assert told_by(heart, heart.lived) == []


def test_a_heartbeat_that_fails_says_so() -> None:
    (error,) = told_by(Heart(error=OSError("no route")))
    assert str(error) == "the heartbeat of this rank failed: OSError: no route"


def test_no_rank_meets_the_others_after_an_error() -> None:
    beat = Heartbeat(Heart(), 60, name=str, fail=pytest.fail, meet=lambda: pytest.fail("met"))
    with pytest.raises(ZeroDivisionError), beat:
        raise ZeroDivisionError


def test_a_failure_of_the_thread_that_moves_messages_reaches_who_waits() -> None:
    poked = threading.Event()

    def poke() -> None:
        poked.set()
        raise OSError("link")

    progress = Progress(poke, 120.0)
    progress.started()
    assert poked.wait(120)
    with pytest.raises(PdmpiError, match="the thread that moves messages failed: OSError: link"):
        progress.wait(lambda: False, lambda: PdmpiError("stalled"))


def test_the_thread_that_moves_messages_looks_while_nobody_waits() -> None:
    """Also after it has found nothing to do for long."""
    looked = threading.Event()
    progress = Progress(looked.set, 120.0, max_sleep_s=50e-6)
    progress.started()
    assert looked.wait(120)

    def left_alone() -> bool:
        """Return whether a while goes by without a look; one may be on its way when a wait begins."""
        looked.clear()
        return not looked.wait(0.05)

    progress.wait(left_alone, lambda: PdmpiError("it looks while another waits"))
    progress.started()
    assert looked.wait(120)
    progress.end()
