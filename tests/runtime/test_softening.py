"""Softened staleness equals the oracle's replay; the realised lag is the program's."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from harness import (
    Silent,
    assert_same,
    make_plan,
    run_config,
    traced,
    train_local,
    train_rank,
)
from oracle import replay

from pdmpi.config.run import RunConfig
from pdmpi.errors import InputError
from pdmpi.runtime.report import StageLag
from pdmpi.runtime.setup import check_fit
from pdmpi.schedule.registry import program_of
from pdmpi.schedule.staleness import version_lag
from pdmpi.transport.local import LocalWorld

pytestmark = pytest.mark.usefixtures("one_random_state")

SAMPLES = 48


def softened(config: RunConfig, **knobs: object) -> RunConfig:
    return config.model_copy(update={"schedule": config.schedule.model_copy(update=knobs)})


def check(config: RunConfig, replicas: list[int], programs: list[int]) -> None:
    plan = make_plan(config, replicas)
    expected = replay(config, plan, programs)
    plain = replay(softened(config, weight_prediction=False, staleness_warmup=0), plan, programs)
    changed = [name for name in expected if not expected[name].equal(plain[name])]
    assert changed, "the option does something"
    for rank, state in enumerate(train_local(config, plan)):
        assert_same(state, expected, f"on rank {rank}")


@pytest.mark.parametrize("knobs", [
    {"weight_prediction": True}, {"staleness_warmup": 7}, {"weight_prediction": True, "staleness_warmup": 20},
], ids=lambda knobs: "-".join(knobs))  # fmt: skip
@pytest.mark.parametrize(("model", "replicas"), [("conv", [1, 1, 1]), ("sequence", [2, 1]), ("conv", [1, 2])])
def test_equals_the_oracle(model: str, replicas: list[int], knobs: dict[str, object]) -> None:
    check(softened(run_config(model), **knobs), replicas, [12])


@pytest.mark.parametrize("schedule", ["pipedream-vsync", "2bw"])
def test_other_stale_schedules(schedule: str) -> None:
    if schedule == "2bw":
        config = run_config("conv", schedule, 4)
        config = config.model_copy(update={"train": config.train.model_copy(update={"minibatch_size": 8})})
        check(softened(config, weight_prediction=True), [1, 1, 1], [6])
    else:
        check(softened(run_config("conv", schedule), weight_prediction=True), [1, 1, 1], [12])


def test_goes_on_over_programs() -> None:
    knobs = {"weight_prediction": True, "staleness_warmup": 9}
    check(softened(run_config("conv", every=4), **knobs), [1, 1, 1], [4, 4, 4])


def test_recomputation_uses_the_predicted_weights_again() -> None:
    config = softened(run_config("sequence"), weight_prediction=True, recompute="always")
    check(config, [1, 1, 1], [12])


@pytest.mark.parametrize(("schedule", "microbatches"), [("pipedream", 1), ("2bw", 4), ("1f1b", 4)])
def test_realised_lag_is_the_programs(schedule: str, microbatches: int) -> None:
    config = run_config("conv", schedule, microbatches, evaluate_every=0)
    plan = make_plan(config, [2, 1, 1])
    listener = Silent()
    world = LocalWorld(plan.num_ranks)
    world.run(lambda transport: train_rank(config, plan, transport, listener)[0])
    (report,) = listener.reports
    lags = version_lag(program_of(plan, report.minibatches))
    found = [asdict(lag) for lag in StageLag.of(report.lags)]
    assert found == [
        {"stage": s, "max": int(lag.max()), "mean": pytest.approx(lag.mean())} for s, lag in enumerate(lags)
    ]


def test_knobs_that_cannot_work_are_refused() -> None:
    config = softened(run_config("conv", "gpipe", 4), weight_prediction=True, staleness_warmup=5)
    config = config.model_copy(
        update={"optimizer": config.optimizer.model_copy(update={"name": "Adam", "args": {"lr": 0.1}})}
    )
    plan = make_plan(config, [1, 1])
    with pytest.raises(InputError) as caught:
        check_fit(config, plan, traced(config), 2)
    text = str(caught.value)
    assert "weight_prediction = true: schedule 'gpipe' has no stale weights" in text
    assert "staleness_warmup = 5: schedule 'gpipe' has no stale weights" in text
    assert "predicts by SGD's momentum" in text


@pytest.mark.parametrize("key", ["nesterov", "maximize"])
def test_steps_that_the_prediction_does_not_know_are_refused(key: str) -> None:
    config = softened(run_config("conv"), weight_prediction=True, staleness_warmup=0)
    args = {**config.optimizer.args, key: True}
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"args": args})})
    with pytest.raises(InputError, match=f"a step of plain SGD, .optimizer. has {key} = true"):
        check_fit(config, make_plan(config, [1, 1]), traced(config), 2)
