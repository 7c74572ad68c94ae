"""Schedules on two real devices equal the oracle, which runs on one of them."""

from __future__ import annotations

import json

import pytest
from launch import REPOSITORY, mpirun

torch = pytest.importorskip("torch", reason="torch is not installed")

RUNTIME = REPOSITORY / "tests" / "runtime"
SCHEDULES = [
    ("pipedream", 1, [1, 1], 12), ("pipedream", 1, [2], 12), ("pipedream-vsync", 1, [1, 1], 12),
    ("2bw", 4, [1, 1], 3), ("gpipe", 4, [1, 1], 3), ("1f1b", 4, [1, 1], 3), ("zb-h1", 4, [1, 1], 3),
]  # fmt: skip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("model", ["conv", "sequence"])
def test_equals_the_oracle(model: str, graphs: bool) -> None:
    """Launched one by one, and by CUDA graphs (but for split backwards)."""
    cases = [(model, *schedule, {}) for schedule in SCHEDULES]
    done = mpirun(
        2, [RUNTIME / "mpi_oracle.py", json.dumps(cases), "cuda", *([] if graphs else ["eager"])],
        env={"OMPI_MCA_pml": "ucx"}, timeout=240,
    )  # fmt: skip
    assert done.stdout.count("equal") == len(cases), done.stdout + done.stderr
    eager = len(cases) if not graphs else sum(name.startswith("zb") for name, *_ in SCHEDULES)
    assert done.stdout.count(" 0 graphs") == eager, done.stdout


@pytest.mark.parametrize("ways", [["compiled"], ["compiled", "eager"]], ids="-".join)
def test_compiled_stages_equal_the_oracle(ways: list[str]) -> None:
    """By the compiler's own kernels, with CUDA graphs and without."""
    cases = [("conv", "pipedream", 1, [1, 1], 12, {}), ("sequence", "1f1b", 4, [1, 1], 3, {})]
    done = mpirun(
        2, [RUNTIME / "mpi_oracle.py", json.dumps(cases), "cuda", *ways],
        env={"OMPI_MCA_pml": "ucx"}, timeout=480,
    )  # fmt: skip
    assert done.stdout.count("equal") == len(cases), done.stdout + done.stderr
    assert done.stdout.count(" 0 graphs") == len(cases) * ("eager" in ways), done.stdout
