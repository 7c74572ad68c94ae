"""Every schedule on every shape leaves the weights that the update rule of the papers leaves."""

from __future__ import annotations

import pytest
from harness import assert_same, make_plan, run_config, train_local
from oracle import replay

pytestmark = pytest.mark.usefixtures("one_random_state")

SHAPES = [[1], [1, 1], [1, 1, 1], [1, 1, 1, 1], [2], [2, 1], [1, 2], [2, 2], [3, 1]]


def check(config, replicas, *, chunks=1, rendezvous=True, seed=None, programs=None):
    plan = make_plan(config, replicas, chunks)
    states = train_local(config, plan, rendezvous=rendezvous, seed=seed)
    m = config.train.minibatch_size
    quantum = 1 if config.schedule.microbatches > 1 else max(1, _lcm(replicas))
    whole = 48 // m // quantum * quantum
    expected = replay(config, plan, programs or [whole])
    for rank, state in enumerate(states):
        assert_same(state, expected, f"on rank {rank}")
    covered = {name for state in states for name in state}
    assert covered == set(expected)


def _lcm(numbers):
    import math

    return math.lcm(*numbers)


@pytest.mark.parametrize("model", ["conv", "sequence"])
@pytest.mark.parametrize("replicas", SHAPES, ids=lambda r: "-".join(map(str, r)))
def test_pipedream(model: str, replicas: list[int]) -> None:
    check(run_config(model), replicas)


@pytest.mark.parametrize("rendezvous", [True, False], ids=["rendezvous", "eager"])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_timing_of_threads(seed: int, rendezvous: bool) -> None:
    check(run_config("conv"), [2, 1, 1], rendezvous=rendezvous, seed=seed)


@pytest.mark.parametrize(
    ("schedule", "replicas"),
    [(schedule, shape) for schedule in ("pipedream-vsync", "2bw", "gpipe", "1f1b") for shape in SHAPES[1:8]]
    + [("zb-h1", shape) for shape in (*SHAPES[1:4], [2, 1], [2, 2])]
    + [("model-parallel", shape) for shape in SHAPES[1:4]]
    + [("data-parallel", [2]), ("data-parallel", [4])],
    ids=str,
)
def test_other_schedules(schedule: str, replicas: list[int]) -> None:
    microbatches = {"pipedream-vsync": 1, "model-parallel": 1, "data-parallel": 1}.get(schedule, 8)
    config = run_config("sequence", schedule, microbatches)
    if microbatches > 1:
        config = config.model_copy(update={"train": config.train.model_copy(update={"minibatch_size": 16})})
    check(config, replicas)


@pytest.mark.parametrize("recompute", ["except-last", "always"])
@pytest.mark.parametrize("model", ["conv", "sequence"])
def test_recomputation_changes_nothing(model: str, recompute: str) -> None:
    config = run_config(model, "gpipe", 4)
    schedule = config.schedule.model_copy(update={"recompute": recompute})
    check(config.model_copy(update={"schedule": schedule}), [1, 1, 1])


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_several_stages_a_rank(schedule: str) -> None:
    check(run_config("conv", schedule, 4), [1, 1, 1, 1], chunks=2)


def test_a_run_in_several_programs() -> None:
    check(run_config("conv", every=5), [2, 1], programs=[4, 4, 4])
