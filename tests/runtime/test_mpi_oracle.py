"""The same equality over real MPI processes, under each MPI library, at 1 to 4 ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import mpirun, of_each_mpi

CASES = {
    1: [("conv", "pipedream", 1, [1], 12, {})],
    2: [("conv", "pipedream", 1, [1, 1], 12, {}),
        ("sequence", "1f1b", 4, [1, 1], 3, {}), ("conv", "data-parallel", 1, [2], 12, {})],
    3: [("sequence", "pipedream", 1, [2, 1], 12, {"gamma": 0.8}),
        ("conv", "pipedream", 1, [1, 2], 12, {}), ("conv", "gpipe", 4, [1, 1, 1], 3, {}),
        ("conv_without_draws", "1f1b", 4, [2, 1], 3, {"train": {"batch_norm": "minibatch"}})],
    4: [("conv", "pipedream", 1, [1, 1, 1, 1], 12, {}), ("sequence", "pipedream", 1, [2, 2], 12, {}),
        ("sequence", "pipedream-vsync", 1, [1, 1, 1, 1], 12, {}), ("conv", "zb-h1", 4, [1, 1, 1, 1], 3, {}),
        ("conv_without_draws", "1f1b", 4, [2, 2], 3,
         {"optimizer": {"clip_norm": 0.7}, "train": {"batch_norm": "synchronised"}})],
}  # fmt: skip


# Fewer under MPICH: what depends on the library is checked there at each number of ranks, without models.
@pytest.mark.parametrize(("mpi", "num_ranks"), of_each_mpi([(n,) for n in CASES], mpich=[(3,), (4,)]))
def test_equals_the_oracle(mpi: str, num_ranks: int) -> None:
    here = Path(__file__).parent
    script = [here / "mpi_oracle.py", json.dumps(CASES[num_ranks]), "cpu"]
    done = mpirun(num_ranks, script, mpi)
    assert done.stdout.count("equal") == len(CASES[num_ranks])
