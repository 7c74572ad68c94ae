"""CUDA graphs on real devices, two or a shared one: eager's results, the fall back, no waits, no leak."""

from __future__ import annotations

import json

import pytest
from launch import REPOSITORY, mpirun

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.gpu


def test_what_graphs_promise() -> None:
    done = mpirun(2, [REPOSITORY / "tests/gpu/graph_checks.py"], env={"OMPI_MCA_pml": "ucx"}, timeout=240)
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(ranks) == 2, done.stdout + done.stderr
    for found in ranks:
        for name, value in found.items():
            if name.endswith("from eager"):
                assert value < 1e-5, (name, value)
            elif name.endswith("graphs"):
                summed_by_mpi = "[2]" in name and torch.cuda.device_count() < 2  # NCCL wants a device each
                assert (value == 0) == summed_by_mpi, name
        reserved, allocated = found["bytes more after 1024 minibatches more"]
        assert reserved <= 0
        assert allocated < 1 << 20
        assert found["segments of a fixed size"] == 0
    assert any("captur" in found["falls back, waits, since"] for found in ranks)
    assert any("on the host" in found["falls back, rolls, since"] for found in ranks)
