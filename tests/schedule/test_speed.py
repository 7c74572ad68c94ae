"""Large programs are made and checked in seconds."""

from __future__ import annotations

import time

from shapes import straight

from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.check import violations
from pdmpi.schedule.registry import generate


def test_a_thousand_ranks_are_scheduled_in_seconds():
    start = time.process_time()
    program = generate(ScheduleChoice(), straight(*[1] * 1024), 1000)
    spent = time.process_time() - start
    assert sum(map(len, program.rows)) > 11_000_000
    assert spent < 6.0  # 1.5 s on the machine it was written on


def test_sixteen_ranks_are_checked_in_seconds():
    program = generate(ScheduleChoice(), straight(*[1] * 16), 2000)
    start = time.process_time()
    assert violations(program) == []
    assert time.process_time() - start < 3.0  # 0.3 s on the machine it was written on
