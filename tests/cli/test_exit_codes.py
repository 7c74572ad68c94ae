from __future__ import annotations

import subprocess
import sys
import time

import pytest
from launch import each_mpi, mpirun

RAISING = """
import sys, types
import click
from pdmpi.cli import main
from pdmpi.errors import InputError, PdmpiError, Requeue

@click.command()
def command():
    {body}

sys.modules["pdmpi.cli.train"] = types.SimpleNamespace(command=command)
sys.argv = ["pdmpi", "train"]
main.main()
"""


def run(body: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RAISING.format(body=body)]
    return subprocess.run(command, capture_output=True, text=True, env=env or None, timeout=300)


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("pass", 0, ""),
        ("raise InputError('train.dtype = 3;\\nset 4')", 2, "pdmpi: error: train.dtype = 3; set 4\n"),
        ("raise PdmpiError('lost')", 1, "pdmpi: error: lost\n"),
        ("raise Requeue('checkpointed at minibatch 5')", 75, "pdmpi: checkpointed at minibatch 5\n"),
        ("raise KeyboardInterrupt", 130, "\npdmpi: interrupted\n"),
        ("raise click.UsageError('wrong')", 2, "pdmpi: error: wrong (see 'pdmpi train --help')\n"),
        ("sys.exit(3)", 3, "pdmpi: error: the program exited with code 3\n"),
        ("sys.exit(0)", 0, ""),
        ("import sklearn_none", 1, None),
        (
            "raise ModuleNotFoundError(\"No module named 'cupy'\", name='cupy')",
            1,
            "pdmpi: error: No module named 'cupy'; install it with: pip install 'pdmpi[cuda13]'\n",
        ),
    ],
)
def test_exit_codes(body: str, code: int, message: str | None) -> None:
    done = run(body)
    assert done.returncode == code
    if message is None:
        assert "Traceback" in done.stderr
    else:
        assert done.stderr == message


def test_debug_shows_the_traceback() -> None:
    done = run("raise InputError('x')", PDMPI_DEBUG="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr


def test_a_closed_pipe_is_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RAISING.format(body="[print('x' * 1000) for _ in range(10**4)]")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout
    assert process.stderr
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(10) == 1


@each_mpi
def test_all_ranks_failing_together_show_one_line_and_keep_the_code(mpi: str) -> None:
    body = "from mpi4py import MPI; MPI.COMM_WORLD.Barrier(); raise InputError('one line')"
    done = mpirun(2, ["-c", RAISING.format(body=body)], mpi, check=False)
    assert done.returncode == 2
    assert done.stderr.count("one line") == 1
    assert "abort" not in done.stderr.lower().split("one line")[0]


@each_mpi
@pytest.mark.parametrize("failure", ["PdmpiError", "RuntimeError"])
def test_one_rank_failing_alone_ends_the_job(mpi: str, failure: str) -> None:
    body = f"""from mpi4py import MPI; import time
    if MPI.COMM_WORLD.rank == 1:
        print("failed at", time.monotonic(), flush=True)
        raise {failure}('stage 1 broke')
    MPI.COMM_WORLD.Barrier()"""
    done = mpirun(2, ["-c", RAISING.format(body=body)], mpi, check=False)
    assert done.returncode != 0
    assert "stage 1 broke [rank 1]" in done.stderr
    assert time.monotonic() - float(done.stdout.split("failed at ")[1].split()[0]) < 10
