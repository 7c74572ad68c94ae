"""A run that was stopped, killed, re-sharded or denied its disk goes on exactly where it was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.fault_run import (
    PAUSE,
    SLOW_DISK,
    arguments,
    assert_same_run,
    assert_same_state,
    losses,
    make_run,
    newest,
    train,
)  # fmt: skip
from launch import start
from tmpfs import mounted

from pdmpi.checkpoint.lock import RunLock
from pdmpi.checkpoint.safetensors import SafetensorsFile, export
from pdmpi.checkpoint.status import read_status

pytestmark = pytest.mark.mpi

STEPS = 96


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Plans, and in ``whole`` the run that nothing interrupted."""
    directory = tmp_path_factory.mktemp("runs")
    make_run(directory, STEPS, (2, 1), (1,), (1, 1), (1, 1, 1), (1, 1, 1, 1))
    code, said = train(directory, "2-1", directory / "whole")
    assert code == 0, said
    assert newest(directory / "whole").manifest.minibatch == STEPS
    return directory


def wait_for_losses_behind(run_dir: Path, minibatch: int, job: subprocess.Popen) -> None:
    """Wait until losses behind so many minibatches are recorded."""
    path = run_dir / "metrics.jsonl"
    wait_for(lambda: path.exists() and path.read_text().count('"loss", ') > minibatch, job)


def wait_for(condition: Callable[[], object], job: subprocess.Popen) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert job.poll() is None, "".join(job.communicate())
        assert time.monotonic() < deadline
        time.sleep(0.02)


def signal_twice(job: subprocess.Popen, run_dir: Path) -> str:
    job.send_signal(signal.SIGUSR1)
    job.send_signal(signal.SIGUSR1)
    return job.communicate(timeout=600)[1]


def signal_during_a_checkpoint(job: subprocess.Popen, run_dir: Path) -> str:
    wait_for(lambda: list((run_dir / "checkpoints").glob(".writing-*")), job)
    job.send_signal(signal.SIGUSR1)
    return job.communicate(timeout=600)[1]


def signal_while_ranks_wait(job: subprocess.Popen, run_dir: Path) -> str:
    """Ranks 0 and 1 wait for messages of a rank that is stopped; it gets the signal, too, when it goes on."""
    stopped = rank_process(job, 2)
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(0.5)
    job.send_signal(signal.SIGUSR1)
    said = ""
    while "received SIGUSR1" not in said:
        line = job.stderr.readline()
        assert line, said
        said += line
    os.kill(stopped, signal.SIGCONT)
    return said + job.communicate(timeout=600)[1]


def kill(job: subprocess.Popen, run_dir: Path) -> str:
    os.kill(rank_process(job, 2), signal.SIGKILL)
    return job.communicate(timeout=600)[1]


def test_a_run_interrupted_in_every_way_is_bitwise_the_whole_one(runs, tmp_path):
    at = 0
    interruptions = (
        (signal_twice, PAUSE, "0.02"), (signal_during_a_checkpoint, SLOW_DISK, "3"),
        (signal_while_ranks_wait, PAUSE, "0.02"), (kill, PAUSE, "0.02"),
    )  # fmt: skip
    for interrupt, slowed, seconds in interruptions:
        job = start(3, arguments(runs, "2-1", tmp_path, "--resume", "auto"), env={slowed: seconds})
        wait_for_losses_behind(tmp_path, at, job)
        said = interrupt(job, tmp_path)
        assert not at or f"minibatch {at}" in said
        status = read_status(tmp_path)
        if interrupt is kill:
            assert job.returncode not in (0, 75), said
            assert "rank 2 (stage 1, replica 0" in said
            assert status.status == "running"
        else:
            assert job.returncode == 75, said
            assert "received SIGUSR1" in said
            assert (status.status, status.reason) == ("requeue", "SIGUSR1")
            assert at < status.minibatch < STEPS
            at = status.minibatch
    code, said = train(runs, "2-1", tmp_path, "--resume", "auto")
    assert code == 0, said
    assert "recovered the lock" in said
    assert_same_run(runs / "whole", tmp_path)
    assert read_status(tmp_path).status == "done"


def rank_process(job: subprocess.Popen, rank: int) -> int:
    """Return the process id of one rank of a job under Open MPI's mpirun."""
    for line in subprocess.check_output(["ps", "-eo", "pid=,ppid="], text=True).splitlines():
        pid, parent = map(int, line.split())
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == job.pid and f"OMPI_COMM_WORLD_RANK={rank}".encode() in environ:
            return pid
    raise AssertionError(f"no rank {rank} under {job.pid}")


def test_other_plans_start_from_the_same_bits(runs, tmp_path):
    """Nothing is left to train, so what each plan read of the one before is written again as it is."""
    whole = newest(runs / "whole")
    before, shards = runs / "whole", [len(whole.manifest.shards)]
    for shape in ("1-1-1-1", "1-1", "1-1-1", "1"):
        code, said = train(runs, shape, tmp_path / shape, "--resume", before)
        assert code == 0, said
        before, found = tmp_path / shape, newest(tmp_path / shape)
        shards.append(len(found.manifest.shards))
        assert_same_state(whole, found)
    assert shards == [2, 4, 2, 3, 1]


def test_another_plan_goes_on_training(runs, tmp_path):
    older = sorted((runs / "whole" / "checkpoints").iterdir())[0]
    assert int(older.name[-4:]) < STEPS
    code, said = train(runs, "1", tmp_path, "--resume", older)
    assert code == 0, said
    assert newest(tmp_path).manifest.minibatch == STEPS
    first = losses(tmp_path)[0]
    assert (first[0], first[1]) == divmod(int(older.name[-4:]), 24)


def test_the_plan_is_made_again_for_the_ranks_that_are_there(runs, tmp_path):
    job = start(2, arguments(runs, "2-1", tmp_path, "--resume", runs / "whole"))
    _, said = job.communicate(timeout=600)
    assert job.returncode == 2
    assert re.search("the plan is for 3 ranks, 2 were started", said)
    job = start(2, arguments(runs, "2-1", tmp_path, "--resume", runs / "whole", "--replan", "auto"))
    _, said = job.communicate(timeout=600)
    assert job.returncode == 0, said
    assert "planned again for 2 ranks" in said
    assert_same_state(newest(runs / "whole"), newest(tmp_path))


def test_an_export_starts_another_run(runs, tmp_path):
    export(newest(runs / "whole"), tmp_path / "model.safetensors")
    code, said = train(runs, "1", tmp_path / "run", "--init", tmp_path / "model.safetensors")
    assert code == 0, said
    assert "started from" in said
    names = SafetensorsFile(tmp_path / "model.safetensors").names
    assert "7.lstm.weight_ih_l0" in names
    assert losses(tmp_path / "run")[0][2] < losses(runs / "whole")[0][2]
    (tmp_path / "model.safetensors").write_bytes(b"x" * 99)
    code, said = train(runs, "1", tmp_path / "run2", "--init", tmp_path / "model.safetensors")
    assert code == 2
    assert "is no safetensors file" in said


def test_a_damaged_checkpoint_is_passed_over(runs, tmp_path):
    code, said = train(runs, "1", tmp_path)
    assert code == 0, said
    best, older = sorted((tmp_path / "checkpoints").iterdir(), reverse=True)
    whole = newest(tmp_path)
    expected = {k: a.bits.copy() for k, a in whole.read(whole.names).items()}
    shard = best / "shard-00000.h5"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    code, said = train(runs, "1", tmp_path, "--resume", "auto")
    assert code == 0, said
    assert f"checkpoint {best.name} is passed over: " in said
    assert f"resumed from {older}" in said
    again = newest(tmp_path)
    assert again.manifest.minibatch == STEPS
    assert all((expected[k] == a.bits).all() for k, a in again.read(again.names).items())
    code, said = train(runs, "1", tmp_path, "--resume", tmp_path / "checkpoints" / "step-000000000001")
    assert code == 2
    assert "does not exist" in said


def test_a_run_that_another_job_holds_is_refused(runs, tmp_path):
    ours = RunLock(tmp_path, job="41")
    code, said = train(runs, "1", tmp_path)
    assert code == 2
    assert f"is in use by job 41, process {os.getpid()} on " in said
    ours.release()


def test_the_time_limit_of_the_job_stops_it_in_time(runs, tmp_path):
    limits = {"SLURM_JOB_ID": "5", "SLURM_JOB_END_TIME": str(int(time.time()) + 4)}
    code, said = train(runs, "1", tmp_path, env=limits)
    assert code == 75, said
    assert "time limit is" in read_status(tmp_path).reason
    assert newest(tmp_path).manifest.minibatch == 6


@pytest.fixture
def small_disk(tmp_path):
    directory = tmp_path / "disk"
    directory.mkdir()
    with mounted(directory, "16500k") as disk:
        yield disk


def test_a_full_disk_loses_new_checkpoints_and_keeps_the_run(runs, small_disk):
    code, said = train(runs, "1", small_disk)
    assert code == 0, said
    assert "is lost, earlier ones are kept: it needs " in said
    assert read_status(small_disk).status == "done"


def test_a_read_only_directory_is_refused(runs, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    code, said = train(runs, "1", small_disk / "run")
    assert code == 2
    assert "cannot be written (Read-only file system); choose another --run-dir" in said
