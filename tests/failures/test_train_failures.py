"""A rank of a real training run is killed or stopped: the job ends soon and says who it was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from faults.fault_run import make_run
from launch import PDMPI, each_mpi, start

from pdmpi.runtime.guardian import instruction_at
from pdmpi.schedule.program import TEMPLATES

LIMIT_S = 10.0


@pytest.fixture(scope="module")
def run_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("train")
    make_run(directory, 100_000, (2, 1))
    config = directory / "run.toml"
    text = config.read_text().replace("silence_timeout_s = 60", "silence_timeout_s = 4")
    config.write_text(text.replace("[checkpoint]", "[checkpoint]\nenabled = false"))
    return directory


def pid_of(rank: int, run_dir: Path) -> int:
    """Find a rank's process by what its launcher told it."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ranks = {f"{name}={rank}".encode() for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK")}
        if str(run_dir).encode() in words and b"train" in words and ranks & set(environment):
            return int(entry.name)
    raise LookupError(f"no rank {rank}")


def is_in_a_program(pid: int) -> bool:
    """Whether a rank runs an instruction now, by what it left for the guardian to read."""
    descriptors = Path(f"/proc/{pid}/fd").iterdir()
    recorder = next(fd for fd in descriptors if "pdmpi-recorder" in os.readlink(fd))
    with recorder.open("rb") as file:
        return " in instruction " in instruction_at(file.fileno(), list(TEMPLATES))


def hits_while_others_wait(pids: list[int], number: int) -> bool:
    """Send a signal to rank 2 in a program; say whether its neighbours, who are to be told of, are in it too.

    Nobody waits for a program's last update: who is stopped in that goes on, to be stopped elsewhere.
    """
    if not all(map(is_in_a_program, pids)):
        return False
    os.kill(pids[2], number)
    if number != signal.SIGSTOP:
        return True
    time.sleep(1.0)
    if all(map(is_in_a_program, pids)):
        return True
    os.kill(pids[2], signal.SIGCONT)
    return False


def run_and_hit(files: Path, run_dir: Path, mpi: str, number: int) -> tuple[int, str]:
    """Send a signal to rank 2 once the run trains; return the exit code and stderr."""
    arguments = [*PDMPI, "train", files / "run.toml", "--plan", files / "2-1.h5", "--run-dir", run_dir]
    begin = time.monotonic()
    job = start(3, arguments, mpi)
    try:
        deadline = begin + 600
        metrics = run_dir / "metrics.jsonl"
        pids: list[int] = []
        while not (pids and hits_while_others_wait(pids, number)):
            assert job.poll() is None, job.communicate()
            assert time.monotonic() < deadline
            if metrics.exists() and metrics.stat().st_size > 1000:
                pids = pids or [pid_of(rank, run_dir) for rank in range(3)]
            time.sleep(0.01 if pids else 0.1)
        limit_s = LIMIT_S + time.monotonic() - begin  # a machine that starts slowly ends slowly
        _, stderr = job.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        pytest.fail(f"still running {limit_s:.1f} s after signal {number}")
    finally:
        if job.poll() is None:
            job.terminate()
    return job.returncode, stderr


@each_mpi
def test_a_killed_rank(run_files: Path, tmp_path: Path, mpi: str) -> None:
    code, stderr = run_and_hit(run_files, tmp_path, mpi, signal.SIGKILL)
    assert code != 0
    assert re.search(r"pdmpi: error: rank 2 \(stage 1, .*\) died in instruction \d+, [A-Z_]+ s1 k\d+", stderr)


@pytest.mark.mpi
def test_a_stopped_rank(run_files: Path, tmp_path: Path) -> None:
    code, stderr = run_and_hit(run_files, tmp_path, "openmpi", signal.SIGSTOP)
    assert code == 1
    stopped = re.search(r"pdmpi: error: rank 2 \(stage 1, .*\) is stopped in instruction \d+, .*", stderr)
    assert stopped, stderr
    neighbours = stopped[0].partition("; its neighbours: ")[2]
    for rank in (0, 1):
        assert re.search(rf"rank {rank} in instruction \d+, [A-Z_]+ s0 k\d+", neighbours), stderr
