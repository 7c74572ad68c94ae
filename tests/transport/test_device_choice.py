"""Which GPU a rank drives, what is refused, and what the probe remembers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdmpi.errors import InputError
from pdmpi.transport.aware import Awareness, probe_awareness
from pdmpi.transport.child import ask_child
from pdmpi.transport.device import choose_device, isolation_problem, sharing_problem


def environment(rank: int, size: int) -> dict[str, str]:
    return {"OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": str(size)}


def test_each_rank_of_a_host_gets_its_own() -> None:
    assert [choose_device(environment(rank, 4), 4) for rank in range(4)] == [0, 1, 2, 3]
    assert choose_device({}, 2) == 0


def test_more_ranks_than_devices_are_refused_unless_allowed() -> None:
    with pytest.raises(InputError, match="4 ranks on this host, but 2 CUDA devices"):
        choose_device(environment(0, 4), 2)
    assert [choose_device(environment(rank, 4), 2, share=True) for rank in range(4)] == [0, 1, 0, 1]


def test_no_device_is_bad_input() -> None:
    with pytest.raises(InputError, match=r"sees no CUDA device \(CUDA_VISIBLE_DEVICES=''\)"):
        choose_device({"CUDA_VISIBLE_DEVICES": ""}, 0)


def test_isolation_by_slurm_is_named() -> None:
    isolated = {"SLURM_GPUS_PER_TASK": "1", **environment(1, 2)}
    assert choose_device(isolated, 1) == 0
    assert "--gpus-per-node" in isolation_problem(isolated, 1)
    assert isolation_problem(environment(1, 2), 2) == ""


def test_shared_devices_are_named() -> None:
    devices = [("h1", "a"), ("h1", "b"), ("h1", "a"), ("h2", "a")]
    assert sharing_problem(devices) == "ranks 0, 2 share one GPU of host h1"
    assert sharing_problem(devices[1:]) == ""


def test_a_child_may_die() -> None:
    assert ask_child("print('[1, 2]')") == [1, 2]
    assert ask_child("import os; os.kill(os.getpid(), 11)") == "killed by signal 11"
    assert ask_child("raise ValueError('no')") == "ValueError: no"
    assert "nothing within" in ask_child("import time; time.sleep(9)", timeout_s=0.3)


def test_the_probe_remembers_by_host_and_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmpi.transport.aware.ask_child", lambda code: "killed by signal 11")
    assert probe_awareness("A 1.0", "", tmp_path) == Awareness(False, "killed by signal 11")
    monkeypatch.setattr("pdmpi.transport.aware.ask_child", lambda code: ["ok"])
    assert probe_awareness("A 1.0", "", tmp_path) == Awareness(False, "killed by signal 11")
    assert probe_awareness("A 1.0", "1.22", tmp_path) == Awareness(True)
    assert len(os.listdir(tmp_path)) == 2
