"""``pdmpi check``: exit codes, tables, JSON, the grid and the text form."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from test_topology_of_plan import CHAIN, plan_of

from pdmpi.cli.check import command
from pdmpi.errors import InputError
from pdmpi.plan.store import save_plan
from pdmpi.schedule.check import UnsafeProgram


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.h5"
    save_plan(plan_of(CHAIN, [(["x", "a"], 1), (["b"], 1), (["c"], 1)]), path)
    return path


def run(*arguments):
    return CliRunner().invoke(command, [str(a) for a in arguments])


def test_a_sound_plan(plan):
    result = run(plan, "--minibatches", 6, "--grid")
    assert result.exit_code == 0
    assert "pipedream: 6 microbatches" in result.output
    assert "rank 0  F0 F1 F2 .  .  .  .  B0 -  F3 B1 -  F4 B2 -  F5 B3 -" in result.output
    assert "safe" in result.output


@pytest.mark.parametrize(
    "name", ["pipedream-vsync", "2bw", "gpipe", "1f1b", "zb-h1", "interleaved", "model-parallel"]
)
def test_every_schedule_that_takes_the_plan(plan, name):
    result = run(plan, "--schedule", name, "--minibatches", 4, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.output)
    assert data["safe"] is True
    assert data["schedule"] == name
    assert data["violations"] == []
    assert [s["slots"]["weights"] for s in data["stages"]] == {
        "pipedream-vsync": [3] * 3,
        "2bw": [2] * 3,
    }.get(name, [1] * 3)
    assert data["version_lag"] == {"pipedream-vsync": [2] * 3, "2bw": [1] * 3}.get(name, [0] * 3)


def test_what_the_plan_does_not_fit_is_bad_input(plan):
    result = run(plan, "--schedule", "zb-v")
    assert isinstance(result.exception, InputError)


def test_a_program_as_text_is_checked_too(plan, tmp_path):
    text = tmp_path / "program.txt"
    assert run(plan, "--minibatches", 4, "--text", text).exit_code == 0
    assert run(text).exit_code == 0
    lines = text.read_text().splitlines()
    broken = next(i for i, line in enumerate(lines) if "WAIT_RECV s1 k2" in line)
    text.write_text("\n".join(lines[:broken] + lines[broken + 1 :]))
    result = run(text)
    assert isinstance(result.exception, UnsafeProgram)
    assert "<-- ERROR HERE" in result.output
    data = json.loads(run(text, "--json").output)
    assert data["safe"] is False
    assert data["violations"][0]["fault"] == "coverage"
    assert data["violations"][0]["rank"] == 1


def test_unreadable_text_is_bad_input(tmp_path):
    assert isinstance(run(tmp_path / "none.txt").exception, InputError)
    text = tmp_path / "other.txt"
    text.write_text("hello")
    assert isinstance(run(text).exception, InputError)
