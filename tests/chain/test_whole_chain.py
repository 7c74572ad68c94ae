"""Profile, plan, simulate, train on real ranks; and what bad input gets instead."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import PDMPI, REPOSITORY, mpirun, of_each_mpi

CONFIG = """
[model]
factory = "pdmpi.model.zoo.digits:digits_net"
args = { width = 8, blocks = 1, hidden = 32 }
[data]
factory = "pdmpi.model.zoo.digits:digits"
[optimizer]
args = { lr = 0.05 }
[train]
minibatch_size = 32
epochs = 1
"""

CLUSTER = REPOSITORY / "configs" / "clusters" / "laptop.toml"


def pdmpi(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *PDMPI, *map(str, arguments)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a configuration, its profile, and plans for two and three ranks."""
    pytest.importorskip("sklearn", reason="scikit-learn brings the data set (pip install 'pdmpi[demo]')")
    directory = tmp_path_factory.mktemp("chain")
    (directory / "run.toml").write_text(CONFIG)
    pdmpi("profile", directory / "run.toml", "-o", directory / "profile.h5")
    for shape in ("1-1", "2-1"):
        planned = (
            "plan",
            directory / "profile.h5",
            "--cluster",
            cluster_of(directory, len(shape)),
            "--shape",
            shape,
        )
        pdmpi(*planned, "-o", directory / f"{shape}.h5")
    return directory


def cluster_of(directory: Path, num_ranks: int) -> Path:
    path = directory / f"cluster-{num_ranks}.toml"
    text = CLUSTER.read_text()
    text = re.sub(r"(?m)^(num_devices|devices_per_node|count) = 4", rf"\1 = {num_ranks}", text)
    path.write_text(text)
    return path


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("mpi", "shape", "num_ranks"),
    of_each_mpi(openmpi=[("2-1", 3)], mpich=[("1-1", 2)]),
)
def test_training_learns_and_reports(
    chain: Path, tmp_path: Path, mpi: str, shape: str, num_ranks: int
) -> None:
    plan = chain / f"{shape}.h5"
    arguments = (*PDMPI, "train", chain / "run.toml", "--plan", plan, "--run-dir", tmp_path / "run", "--json")
    done = mpirun(num_ranks, arguments, mpi)
    report = json.loads(done.stdout)
    assert report["num_ranks"] == num_ranks
    assert report["samples"] == 1438 // (32 * num_ranks_a_round(shape)) * 32 * num_ranks_a_round(shape)
    assert report["samples_per_s"] > 0
    assert report["predicted_samples_per_s"] > 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "loss"]
    assert len(losses) == report["samples"] // 32
    assert sum(losses[-5:]) < sum(losses[:5])
    assert {"start", "segment", "evaluation", "end"} <= {record["kind"] for record in records}
    assert "Traceback" not in done.stderr


def num_ranks_a_round(shape: str) -> int:
    return max(map(int, shape.split("-")))


def test_simulation_predicts_and_draws(chain: Path, tmp_path: Path) -> None:
    plot, trace = tmp_path / "p.png", tmp_path / "t.json"
    done = pdmpi("simulate", chain / "2-1.h5", "--plot", plot, "--trace", trace, "--json")
    assert json.loads(done.stdout)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["traceEvents"]


def changed(chain: Path, old: str, new: str) -> Path:
    path = chain / "changed.toml"
    assert old in CONFIG
    path.write_text(CONFIG.replace(old, new))
    return path


def all_that_differs(chain: Path) -> tuple[Path, Path]:
    """Another model, minibatch, schedule and optimizer: one line tells them all."""
    path = changed(chain, "width = 8", "width = 4")
    text = path.read_text().replace("minibatch_size = 32", "minibatch_size = 24")
    text = text.replace("[train]", "[schedule]\nname = 'gpipe'\nmicrobatches = 4\n[train]")
    path.write_text(text.replace("[optimizer]", "[optimizer]\nname = 'SDG'"))
    return path, chain / "1-1.h5"


def other_ranks(chain: Path) -> tuple[Path, Path]:
    return chain / "run.toml", chain / "2-1.h5"


def truncated_plan(chain: Path) -> tuple[Path, Path]:
    path = chain / "truncated.h5"
    whole = (chain / "1-1.h5").read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return chain / "run.toml", path


def flipped_bit(chain: Path) -> tuple[Path, Path]:
    path = chain / "flipped.h5"
    whole = bytearray((chain / "1-1.h5").read_bytes())
    at = bytes(whole).rindex(b"Conv2d") if b"Conv2d" in whole else len(whole) // 2
    whole[at] ^= 1
    path.write_bytes(whole)
    return chain / "run.toml", path


def misspelt_key(chain: Path) -> tuple[Path, Path]:
    return changed(chain, "epochs", "epohcs"), chain / "1-1.h5"


def missing_model(chain: Path) -> tuple[Path, Path]:
    return changed(chain, "digits:digits_net", "digits:digits_nett"), chain / "1-1.h5"


BAD_INPUTS = {
    all_that_differs: (
        "another model", r"microbatches of 32, .* is 6", "'pipedream'.*'gpipe'", "microbatches = 4",
        "SDG.*did you mean 'SGD'",
    ),
    other_ranks: (r"\b3\b.*\b2\b",),
    truncated_plan: (r"truncated\.h5",),
    flipped_bit: (r"flipped\.h5",),
    misspelt_key: (r"unknown key \[train\] epohcs; did you mean 'epochs'",),
    missing_model: ("digits_nett",),
}  # fmt: skip


@pytest.mark.mpi
@pytest.mark.parametrize("bad", BAD_INPUTS, ids=lambda bad: bad.__name__)
def test_bad_input_gets_one_line_and_code_2(chain: Path, tmp_path: Path, bad) -> None:  # type: ignore[no-untyped-def]
    config, plan = bad(chain)
    arguments = (*PDMPI, "train", config, "--plan", plan, "--run-dir", tmp_path / "run")
    done = mpirun(2, arguments, check=False)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("pdmpi: error:")]
    assert len(lines) == 1, done.stderr
    assert [words for words in BAD_INPUTS[bad] if not re.search(words, lines[0])] == [], lines[0]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["run.toml", "profile.h5", "none.h5", "truncated.h5"])
def test_files_that_are_no_plan(chain: Path, name: str) -> None:
    truncated_plan(chain)
    done = pdmpi("simulate", chain / name, code=2)
    assert re.fullmatch(rf"pdmpi: error: .*{re.escape(name)}.*\n", done.stderr)


def test_more_stages_than_layers(chain: Path) -> None:
    shape = "-".join(["1"] * 40)
    arguments = ("plan", chain / "profile.h5", "--cluster", cluster_of(chain, 40), "--shape", shape)
    done = pdmpi(*arguments, "-o", chain / "none.h5", code=2)
    assert done.stderr.startswith("pdmpi: error:")
    assert len(done.stderr.splitlines()) == 1
    assert re.search(r"\b40\b", done.stderr)
    assert not (chain / "none.h5").exists()
