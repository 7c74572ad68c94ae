"""Schedules on two real devices, or on one that two ranks share, equal the oracle, which runs on one."""

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

pytestmark = pytest.mark.gpu


def is_eager(replicas: list[int]) -> bool:
    """Sums by MPI are eager, which ranks that share a device need."""
    return replicas == [2] and torch.cuda.device_count() < 2


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("model", ["conv", "sequence"])
def test_equals_the_oracle(model: str, graphs: bool) -> None:
    """Launched one by one, and by CUDA graphs where a schedule can be."""
    cases = [(model, *schedule, {}) for schedule in SCHEDULES]
    cases.append((model, "pipedream", 1, [1, 1], 12, {"gamma": 0.8}))
    cases.append((model, "zb-v", 4, [1, 1, 1, 1], 3, {"chunks": 2}))
    done = mpirun(
        2, [RUNTIME / "mpi_oracle.py", json.dumps(cases), "cuda", *([] if graphs else ["eager"])],
        env={"OMPI_MCA_pml": "ucx"}, timeout=240,
    )  # fmt: skip
    assert done.stdout.count("equal") == len(cases), done.stdout + done.stderr
    eager = sum(not graphs or is_eager(replicas) for _, _, _, replicas, _, _ in cases)
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
