"""The planner's commands: what they print and write, and bad input: one line, code 2, nothing written."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from plan_cases import CLUSTERS, REPOSITORY, residual_net

from pdmpi.cli.main import cli
from pdmpi.errors import InputError
from pdmpi.graph import LayerGraph
from pdmpi.plan.profile import Profile
from pdmpi.plan.store import load_plan, save_profile

SLOW = CLUSTERS / "a-4x4.toml"
LAPTOP = CLUSTERS / "laptop.toml"


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    path = tmp_path_factory.mktemp("profiles") / "profile.h5"
    save_profile(residual_net(), path)
    return path


def run(*arguments: object) -> str:
    done = CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(*arguments: object, match: str) -> None:
    with pytest.raises(InputError, match=match):
        CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False)


def test_plan_and_show(profile, tmp_path):
    out = tmp_path / "plan.h5"
    given = ("--shape", "2-1-1", "--extra-in-flight", 0)
    text = run("plan", profile, "--cluster", LAPTOP, *given, "-o", out, "--explain")
    assert "2-1-1 on laptop, pipedream" in text
    assert "data-parallel" in text
    assert "Bound by" in text
    assert "Are there four microbatches a stage?" in text
    plan = load_plan(out)
    assert [stage.replicas for stage in plan.stages] == [2, 1, 1]
    assert set(plan.alternatives) == {"data-parallel", "model-parallel", "gpipe"}
    assert plan.schedule.recompute == "never"
    shown = json.loads(run("show", out, "--json"))
    assert shown["shape"] == "2-1-1"
    assert [stage["in_flight_depth"] for stage in shown["stages"]] == [2, 2, 1]
    pictures = [tmp_path / "plan.png", tmp_path / "graph.svg"]
    run("show", out, "--plot", pictures[0], "--graph", pictures[1])
    assert all(picture.stat().st_size > 5000 for picture in pictures)
    refused("show", out, "--plot", pictures[0], match="exists")
    assert "15 layers" in run("show", profile)


def test_top_ranks_by_prediction(profile):
    found = json.loads(run("plan", profile, "--cluster", SLOW, "--top", 4, "--json"))
    rates = [plan["prediction"]["samples_per_s"] for plan in found["ranking"]]
    assert rates == sorted(rates, reverse=True)
    assert len({len(plan["stages"]) for plan in found["ranking"]}) == len(rates) == 4


def test_schedule_auto_says_why(profile):
    found = json.loads(
        run("plan", profile, "--cluster", SLOW, "--schedule", "auto", "--microbatches", 16, "--json")
    )
    rates = {one["schedule"]: one["samples_per_s"] for one in found["considered"]}
    assert len(rates) == 10
    assert found["prediction"]["samples_per_s"] >= 0.98 * max(rates.values())
    assert all(one["usable"] or one["note"] for one in found["considered"])
    assert found["why"].startswith(f"{found['schedule']['name']}: ")


def test_several_clusters(profile, tmp_path):
    out = tmp_path / "best.h5"
    found = json.loads(run("plan", profile, "--cluster", LAPTOP, "--cluster", SLOW, "-o", out, "--json"))
    assert [plan["cluster"] for plan in found["plans"]] == ["laptop", "a-4x4"]
    assert load_plan(out).cluster.name == "a-4x4"


@pytest.mark.parametrize("extra", ["0", "auto"])
@pytest.mark.parametrize(
    "given", [("--shape", "2-1-1"), ("--shape", "3-1"), ("--schedule", "1f1b", "--microbatches", "8")]
)
def test_what_a_plan_predicts_is_what_it_simulates(profile, tmp_path, given, extra):
    out = tmp_path / "plan.h5"
    run("plan", profile, "--cluster", LAPTOP, *given, "--extra-in-flight", extra, "-o", out)
    found = json.loads(run("simulate", out, "--json"))
    assert found["report"]["samples_per_s"] == found["planned_samples_per_s"]


def test_replicas_that_wait_for_each_other_get_more_in_flight(profile):
    given = ("plan", profile, "--cluster", LAPTOP, "--shape", "2-1-1", "--json")
    plain, more = (json.loads(run(*given, "--extra-in-flight", extra)) for extra in ("0", "auto"))
    assert more["schedule"]["extra_in_flight"] > 0
    assert more["prediction"]["samples_per_s"] > 1.1 * plain["prediction"]["samples_per_s"]


@pytest.mark.parametrize("model", ["pipedream2019-code", "pipedream2019"])
def test_published_models(profile, model):
    assert (
        json.loads(run("plan", profile, "--cluster", SLOW, "--cost-model", model, "--json"))["num_ranks"]
        <= 16
    )


def test_advise(profile):
    found = json.loads(run("advise", profile, "--cluster", SLOW, "--json"))
    assert isinstance(found["pipeline"], bool)
    assert len(found["answers"]) == 5
    assert "Verdict" in run("advise", profile, "--cluster", LAPTOP)


def test_sweep(profile, tmp_path):
    plot = tmp_path / "sweep.png"
    arguments = ("--gpus", "1..8", "--bandwidth", "0.1,10Gbps", "--cluster", SLOW, "--workers", 2)
    found = json.loads(run("sweep", profile, *arguments, "--plot", plot, "--json"))["cases"]
    assert [case["devices"] for case in found] == [1, 2, 4, 8] * 2
    assert {case["bandwidth_bytes_per_s"] for case in found} == {1.25e7, 1.25e9}
    assert all(case["samples_per_s"] >= case["data_parallel_samples_per_s"] * 0.999 for case in found)
    assert plot.stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "9-9"), "needs 18 devices, cluster 'a-4x4' has 16"),
        (("--shape", "2-x"), "no list of replica counts"),
        (("--shape", "0-1"), "a stage without replicas"),
        (("--schedule", "pipedrem"), "did you mean 'pipedream'"),
        (
            ("--schedule", "1f1b", "--microbatches", "3", "--shape", "2-1"),
            "must be a multiple of every count",
        ),
        (("--schedule", "data-parallel", "--shape", "1-1"), "takes one stage"),
        (("--extra-in-flight", "-1"), "neither a number of at least 0 nor 'auto'"),
        (("--cost-model", "pipedream2019", "--top", "2"), "leave out"),
    ],
)
def test_bad_plans(profile, tmp_path, arguments, message):
    out = tmp_path / "plan.h5"
    refused("plan", profile, "--cluster", SLOW, "-o", out, *arguments, match=message)
    assert not out.exists()


def test_too_little_memory_names_the_layer_and_the_remedy(profile, tmp_path):
    tiny = tmp_path / "tiny.toml"
    tiny.write_text(LAPTOP.read_text().replace("2 GiB", "6 MB"))
    refused(
        "plan", profile, "--cluster", tiny,
        match=r"smallest plan needs 0\.0\d+ GiB at layer 'head', devices have .*; try .*more devices",
    )  # fmt: skip


def test_models_that_cannot_be_planned(tmp_path):
    net = residual_net()
    empty = tmp_path / "empty.h5"
    save_profile(Profile(graph=LayerGraph((), ()), costs=(), microbatch_size=1), empty)
    refused("plan", empty, "--cluster", LAPTOP, match="no layer of the profile has parameters")
    inputs = LayerGraph(net.graph.layers[:2], ())
    save_profile(Profile(graph=inputs, costs=net.costs[:2], microbatch_size=1), empty, force=True)
    refused("plan", empty, "--cluster", LAPTOP, match="no layer of the profile has parameters")


def test_an_output_that_exists(profile, tmp_path):
    out = tmp_path / "plan.h5"
    out.write_text("mine")
    refused(
        "plan", profile, "--cluster", LAPTOP, "-o", out, match="exists; choose another name or give --force"
    )
    assert out.read_text() == "mine"
    run("plan", profile, "--cluster", LAPTOP, "-o", out, "--force")
    assert load_plan(out).num_ranks >= 1


def test_import_profile(tmp_path):
    graph, out = tmp_path / "graph.txt", tmp_path / "p.h5"
    graph.write_text(
        "node1 -- Linear(2, 2) -- forward_compute_time=1, backward_compute_time=2, "
        "activation_size=8, parameter_size=16\n"
    )
    assert json.loads(run("import-profile", graph, "-o", out, "--json"))["layers"][0]["parameter_bytes"] == 16
    graph.write_text("node1 --\n")
    refused("import-profile", graph, "-o", tmp_path / "q.h5", match="line 1")
    assert not (tmp_path / "q.h5").exists()


@pytest.mark.parametrize("text", ["", "0", "4..x", "1..99999999"])
def test_bad_counts(profile, text):
    refused("sweep", profile, "--gpus", text, match="no range or list of counts")


def test_partition_tool_runs_from_a_bare_checkout_without_torch_and_mpi(profile, tmp_path):
    for name in ("torch", "mpi4py", "cupy"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not on this machine')\n")
    out = tmp_path / "plan.h5"
    tool = REPOSITORY / "tools" / "partition"
    command = [sys.executable, str(tool), str(profile), "--cluster", str(LAPTOP), "-o", str(out)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd="/",
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert load_plan(out).cluster.name == "laptop"
    again = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
