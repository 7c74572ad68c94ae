"""Diagrams, traces and the command: what they hold, for every schedule."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.image import imread
from simulated_programs import ASYNCHRONOUS, SCHEDULE_NAMES, topology_for
from small_plans import small_plan

from pdmpi.cli.simulate import command
from pdmpi.errors import InputError
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.plan.store import save_plan
from pdmpi.schedule.program import Op, Topology
from pdmpi.schedule.registry import generate
from pdmpi.simulate.boxes import boxes
from pdmpi.simulate.costs import Costs
from pdmpi.simulate.draw import draw
from pdmpi.simulate.engine import simulate
from pdmpi.simulate.palette import colour
from pdmpi.simulate.timeline import Timeline
from pdmpi.simulate.trace import write_trace


def timeline_of(name: str, minibatches: int = 6, message_s: float = 0.05) -> Timeline:
    topology = topology_for(name, 3, [2, 1])
    microbatches = 1 if name in ASYNCHRONOUS else 6
    program = generate(ScheduleChoice(name=name, microbatches=microbatches), topology, minibatches)
    return simulate(program, Costs.uniform(topology, message_s=message_s))


def share_of(picture: np.ndarray, wanted: tuple[float, ...]) -> float:
    """Return the share of a picture's pixels that have a colour."""
    return float((np.abs(picture[..., :3] - np.array(wanted)).max(axis=-1) < 0.02).mean())


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_schedule_is_drawn(name: str, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    draw(timeline_of(name, 6 if name in ASYNCHRONOUS else 1), path)
    picture = imread(path)
    backward = Op.BACKWARD_INPUT if name.startswith("zb") else Op.BACKWARD
    assert share_of(picture, colour(Op.FORWARD)) > 0.02
    assert share_of(picture, colour(backward)) > 0.02
    assert picture.shape[1] < 2600


def test_a_long_program_stays_on_one_page(tmp_path: Path) -> None:
    path = tmp_path / "long.png"
    draw(timeline_of("pipedream", 600), path)
    assert imread(path).shape[1] < 2600


def test_prediction_over_measurement(tmp_path: Path) -> None:
    found = timeline_of("pipedream")
    slower = Timeline(
        found.program, *(tuple(1.1 * t for t in times) for times in (found.start_s, found.end_s))
    )
    alone, both = tmp_path / "alone.png", tmp_path / "both.png"
    draw(found, alone)
    draw(found, both, measured=slower)
    assert imread(both).shape[0] > imread(alone).shape[0] * 1.2


def test_boxes_carry_microbatch_and_version() -> None:
    program = generate(ScheduleChoice(), Topology.straight([1, 1]), 4)
    found = simulate(program, Costs.uniform(program.topology))
    seen = [(b.op, b.microbatch, b.version, b.start_s) for b in boxes(found, 0, 0.0, 100.0)][:6]
    assert seen == [
        (Op.FORWARD, 0, 0, 0.0), (Op.FORWARD, 1, 0, 1.0), (Op.BACKWARD, 0, 0, 4.0), (Op.UPDATE, 0, 1, 6.0),
        (Op.FORWARD, 2, 1, 6.0), (Op.BACKWARD, 1, 0, 7.0),
    ]  # fmt: skip
    assert [b.microbatch for b in boxes(found, 0, 6.5, 7.5)] == [2, 1]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_trace_has_every_computation_and_an_arrow_for_every_message(name: str, tmp_path: Path) -> None:
    found = timeline_of(name)
    path = tmp_path / "trace.json"
    write_trace(found, path)
    events = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    computed = sum(int(np.isin(rows[:, 0], [4, 5, 6, 7, 8, 11]).sum()) for rows in found.program.rows)
    assert sum("version" in e["args"] for e in spans) == computed
    starts, finishes = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
    assert len(starts) == len(finishes) == len(found.transfers)
    assert all(finishes[i]["ts"] >= e["ts"] for i, e in starts.items())
    for rank in range(found.program.topology.num_ranks):
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["pid"] == rank)
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(mine))


def test_a_trace_of_both(tmp_path: Path) -> None:
    found = timeline_of("1f1b")
    path = tmp_path / "trace.json"
    write_trace(found, path, measured=Timeline(found.program, found.start_s, found.end_s))
    names = [
        e["args"]["name"] for e in json.loads(path.read_text())["traceEvents"] if e["name"] == "process_name"
    ]
    assert names[0].startswith("predicted rank 0")
    assert names[-1].startswith(f"measured rank {found.program.topology.num_ranks - 1}")


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.h5"
    save_plan(small_plan(2, 1, 1), path)
    return path


def test_the_command_prints_draws_and_traces(plan_file: Path, tmp_path: Path) -> None:
    picture, trace = tmp_path / "p.png", tmp_path / "t.json"
    ran = CliRunner().invoke(command, [str(plan_file), "--plot", str(picture), "--trace", str(trace)])
    assert ran.exit_code == 0, ran.output
    assert "samples/s" in ran.output
    assert picture.stat().st_size > 10_000
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize("name", ["pipedream", "gpipe", "1f1b", "2bw", "zb-h1"])
def test_the_command_answers_in_json(plan_file: Path, name: str) -> None:
    ran = CliRunner().invoke(command, [str(plan_file), "--schedule", name, "--json"])
    assert ran.exit_code == 0, ran.output
    data = json.loads(ran.output)
    assert data["schedule"]["name"] == name
    assert data["report"]["samples_per_s"] > 0
    assert len(data["report"]["ranks"]) == 4
    assert all(0 < rank["utilisation"] <= 1.0001 for rank in data["report"]["ranks"])
    assert all(rank["memory_bytes"] > 0 for rank in data["report"]["ranks"])


def test_the_command_chooses_the_depth(plan_file: Path) -> None:
    options = [[str(plan_file), "--extra-in-flight", extra, "--json"] for extra in ("0", "auto")]
    runs = [CliRunner().invoke(command, given) for given in options]
    none, auto = (json.loads(ran.output) for ran in runs)
    assert none["schedule"]["extra_in_flight"] == 0
    assert auto["schedule"]["extra_in_flight"] > 0
    assert auto["report"]["samples_per_s"] > 1.3 * none["report"]["samples_per_s"]


def test_very_many_ranks_are_shown_in_part(tmp_path: Path) -> None:
    program = generate(ScheduleChoice(), Topology.straight([1] * 100), 3)
    path = tmp_path / "many.png"
    draw(simulate(program, Costs.uniform(program.topology, message_s=0.1)), path)
    assert imread(path).shape[0] < 2600


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schedule", "pipedraem"], "did you mean 'pipedream'"),
        (["--schedule", "zb-v"], "zb-v"),
        (["--minibatches", "3"], "multiple of 2"),
        (["--plot", "p.bmp"], "p.bmp"),
        (["--extra-in-flight", "some"], "neither a number nor auto"),
        (["--trace", "nowhere/t.json"], "no directory nowhere"),
    ],
)
def test_bad_input_is_named(plan_file: Path, options: list[str], message: str) -> None:
    ran = CliRunner().invoke(command, [str(plan_file), *options])
    assert isinstance(ran.exception, InputError)
    assert message in str(ran.exception)
