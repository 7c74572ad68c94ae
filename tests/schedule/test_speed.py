"""Large programs are made and checked in seconds: a few times what their size costs on the same machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from shapes import straight

from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.check import violations
from pdmpi.schedule.registry import generate


def seconds(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return what ``work`` returns and the processor time it took."""
    start = time.process_time()
    result = work()
    return result, time.process_time() - start


def test_a_thousand_ranks_are_scheduled_in_seconds():
    """1.5 s where its 360 MB are copied and joined in 0.4 s; more than that is a machine short of memory."""
    program, spent_s = seconds(lambda: generate(ScheduleChoice(), straight(*[1] * 1024), 1000))
    joined, peer_s = seconds(lambda: np.concatenate([rows.copy() for rows in program.rows]))
    assert len(joined) > 11_000_000
    assert spent_s < 12 * peer_s


def test_sixteen_ranks_are_checked_in_seconds():
    """0.3 s where Python counts the instructions' operands in a quarter of that; the best of three each."""
    program = generate(ScheduleChoice(), straight(*[1] * 16), 2000)
    operands = [row for rows in program.rows for row in rows.tolist()]
    assert violations(program) == []
    spent_s = min(seconds(lambda: violations(program))[1] for _ in range(3))
    peer_s = min(seconds(lambda: sum(o >= 0 for row in operands for o in row))[1] for _ in range(3))
    assert spent_s < 20 * peer_s
