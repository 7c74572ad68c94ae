from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from pdmpi.cli.output import Progress, emit, json_option, table
from pdmpi.plan.units import human_bytes, human_seconds


@dataclass
class Point:
    x_s: float


def test_json_is_valid_whatever_the_types(capsys: pytest.CaptureFixture[str]) -> None:
    data = {
        "array": np.arange(3), "scalar": np.float32(0.5), "nan": float("nan"), "inf": np.array([np.inf]),
        "path": Path("a/b"), "point": Point(1.0), "set": {"b", "a"}, 3: (1, 2),
        "none": None, "flag": np.bool_(True),
    }  # fmt: skip
    emit(data, "", as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "array": [0, 1, 2], "scalar": 0.5, "nan": None, "inf": [None], "path": "a/b", "point": {"x_s": 1.0},
        "set": ["a", "b"], "3": [1, 2], "none": None, "flag": True,
    }  # fmt: skip


def test_a_script_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    script = f'#SBATCH --output="{"a long directory/" * 20}job.log"\necho [bold]'
    emit({}, script, as_json=False)
    assert capsys.readouterr().out == script + "\n"


def test_tables_align_numbers_right_and_keep_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    shown = table("stages", ["layer", "time"], [["features[0]", "1.5 ms"], ["[bold]", "12 ms"]])
    emit({}, [shown, "after [red]it"], as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in lines if " ms" in line] == [
        "  features[0]   1.5 ms",
        "  [bold]         12 ms",
    ]
    assert lines[-1] == "after [red]it"


def test_a_wide_table_in_a_pipe_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    emit({}, table("t", ["a", "b"], [["x" * 70, "y" * 60]]), as_json=False)
    assert f"{'x' * 70}   {'y' * 60}" in capsys.readouterr().out


def test_json_option() -> None:
    @click.command()
    @json_option
    def command(as_json: bool) -> None:
        emit({"answer": 42}, "forty-two", as_json)

    assert CliRunner().invoke(command, []).output == "forty-two\n"
    assert json.loads(CliRunner().invoke(command, ["--json"]).output) == {"answer": 42}


def test_progress_in_a_log_is_lines_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("layers", 100, interval_s=3600) as progress:
        for i in range(101):
            progress.update(i, f"loss {i}")
    with Progress("silent", 1, shown=False) as progress:
        progress.update(1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "layers: 0/100 loss 0\nlayers: 100/100 loss 100\n"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 40, "5.0 TiB")],
)
def test_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (12.5, "12.5 s"), (0.0015, "1.5 ms"), (2e-6, "2 µs"), (3e-9, "3 ns")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text
