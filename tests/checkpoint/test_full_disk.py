"""A disk that is really full, whatever its statistics said: the old checkpoint stays, the writer goes on."""

from __future__ import annotations

import numpy as np
import pytest
from tmpfs import mounted

from pdmpi.checkpoint import Array, CheckpointWriter, Snapshot, latest
from pdmpi.checkpoint import writer as writer_module
from pdmpi.checkpoint.store import Alone


@pytest.fixture
def disk(tmp_path):
    with mounted(tmp_path, "5m") as disk:
        yield disk


def test_the_new_one_is_lost_and_nothing_is_left_of_it(disk, monkeypatch):
    monkeypatch.setattr(writer_module, "free_bytes", lambda path: 1 << 40)
    notes: list[str] = []
    writer = CheckpointWriter(disk, group=Alone(), writers=[0], fingerprint="f", keep=1, notice=notes.append)

    def save(step: int, megabytes: int):
        array = Array.of(np.full(megabytes << 17, float(step)))
        writer.save(step, Snapshot(parameters={"w": array}), {})
        return writer.finish()

    assert save(1, 2) is not None
    assert save(2, 4) is None
    assert "minibatch 2 is lost, earlier ones are kept: rank 0: [Errno 28]" in notes[0]
    assert [path.name for path in (disk / "checkpoints").iterdir()] == ["step-000000000001"]
    (disk / "ballast").write_bytes(bytes(5 << 19))
    assert save(3, 1) is None
    (disk / "ballast").unlink()
    assert save(4, 2) is not None
    assert latest(disk).manifest.minibatch == 4
    assert len(notes) == 2
