"""What a rank leaves for others of its host to read: where in which program it is."""

from __future__ import annotations

import numpy as np

from pdmpi.runtime.guardian import NUM_COLUMNS, instruction_at
from pdmpi.runtime.recorder import Recorder
from pdmpi.schedule.program import TEMPLATES


def test_a_place_is_told_in_a_program_and_between_programs() -> None:
    recorder = Recorder()

    def place() -> str:
        return instruction_at(recorder.descriptor, list(TEMPLATES))

    assert place() == ""
    rows = np.zeros((3, NUM_COLUMNS), np.int32)
    rows[:, 0] = [0, 1, 0]
    number = recorder.begin(rows)
    assert place() == " between programs"
    number[0] = 1
    assert place() == f" in instruction 1, {list(TEMPLATES)[1].format(*rows[1])}"
    recorder.end()
    assert place() == " between programs"
    recorder.close()
