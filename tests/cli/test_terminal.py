from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from launch import MPI_ENVIRONMENT, command, each_mpi, mpirun

REPORT = "from pdmpi.cli.terminal import is_terminal; print('seen', is_terminal(1), is_terminal(2))"


def test_a_pipe_is_no_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, text=True, timeout=300)
    assert done.stdout == "seen False False\n"


@each_mpi
def test_ranks_in_a_log_see_none(mpi: str) -> None:
    printed = mpirun(2, ["-c", REPORT], mpi).stdout
    words = printed.replace("seen", " seen ").split()  # two ranks' lines may share one
    assert sorted(words) == ["False"] * 4 + ["seen"] * 2


@each_mpi
@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="finding the launcher's streams needs Linux's /proc"
)
def test_ranks_find_their_launchers_terminal(mpi: str) -> None:
    main, other = pty.openpty()
    environment = os.environ | MPI_ENVIRONMENT[mpi]
    job = subprocess.Popen(
        command(1, ["-c", REPORT], mpi), env=environment, stdin=subprocess.DEVNULL, stdout=other,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    job.wait(60)
    os.close(other)
    assert "seen True False" in os.read(main, 1000).decode()
    os.close(main)
