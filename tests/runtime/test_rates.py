"""Learning rates over a run: torch's schedulers, counted in minibatches of the run by every stage."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import (
    Silent,
    assert_same,
    make_plan,
    run_config,
    traced,
    train_local,
    train_rank,
)
from hypothesis import given
from hypothesis import strategies as st
from oracle import replay
from torch import nn
from torch.optim import lr_scheduler

from pdmpi.config.run import OptimizerConfig, RunConfig
from pdmpi.errors import InputError
from pdmpi.model.lr_schedule import LrSchedule, lr_schedule_problems
from pdmpi.runtime.rates import Rates
from pdmpi.runtime.setup import check_fit
from pdmpi.transport.local import LocalWorld

pytestmark = pytest.mark.usefixtures("one_random_state")

WARMUP, DECAY = 4, 11
TURNS = [
    {"name": "LinearLR", "args": {"start_factor": 0.2, "total_iters": WARMUP}, "length": WARMUP},
    {"name": "CosineAnnealingLR", "args": {"T_max": DECAY}},
]
GROUPS = [{"match": ["*.bias"], "args": {"lr": 0.02}}]


def factor(minibatch: int) -> float:
    """What the two turns multiply a rate by."""
    if minibatch < WARMUP:
        return 0.2 + 0.8 * minibatch / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (minibatch - WARMUP) / DECAY))


def scheduled(config: RunConfig, **knobs: Any) -> RunConfig:
    found = config.model_dump()
    found["optimizer"].update({"lr_schedulers": TURNS, "groups": GROUPS, **knobs})
    return RunConfig.model_validate(found)


def optimizer_config(*turns: dict[str, Any], **knobs: Any) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"lr_schedulers": turns, **knobs})


def check(config: RunConfig, replicas: list[int], programs: list[int]) -> None:
    plan = make_plan(config, replicas)
    expected = replay(config, plan, programs, factor=factor)
    constant = replay(config, plan, programs)
    assert not any(expected[name].equal(constant[name]) for name in ("0.weight", "0.bias"))
    for rank, state in enumerate(train_local(config, plan)):
        assert_same(state, expected, f"on rank {rank}")


@pytest.mark.parametrize(("schedule", "microbatches", "replicas"), [
    ("pipedream", 1, [1, 1, 1]), ("pipedream", 1, [2, 1]), ("pipedream", 1, [1, 3]),
    ("data-parallel", 1, [3]), ("pipedream-vsync", 1, [1, 1]), ("2bw", 2, [1, 1]),
    ("1f1b", 2, [1, 1]), ("gpipe", 2, [2, 1]),
], ids=str)  # fmt: skip
def test_equals_the_oracle(schedule: str, microbatches: int, replicas: list[int]) -> None:
    """Stages with replicas update less often, and reach each rate at the same minibatch."""
    config = scheduled(run_config("conv", schedule, microbatches, minibatch_size=4))
    check(config, replicas, [12])


def test_over_programs_with_clipping_and_all_that_softens() -> None:
    config = scheduled(run_config("conv", every=4), clip_norm=0.7)
    check(config, [1, 1], [4, 4, 4])
    knobs = {"weight_prediction": True, "staleness_warmup": 9}
    softened = scheduled(run_config("conv", every=4), groups=[])
    softened = softened.model_copy(update={"schedule": softened.schedule.model_copy(update=knobs)})
    check(softened, [1, 1, 1], [4, 4, 4])


CLASSES = {
    "StepLR": {"step_size": 3, "gamma": 0.5}, "MultiStepLR": {"milestones": [2, 9], "gamma": 0.1},
    "ConstantLR": {"factor": 0.5, "total_iters": 6}, "LinearLR": {"total_iters": 7},
    "ExponentialLR": {"gamma": 0.9}, "PolynomialLR": {"total_iters": 15, "power": 2.0},
    "CosineAnnealingLR": {"T_max": 12, "eta_min": 0.01}, "CosineAnnealingWarmRestarts": {"T_0": 5},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 4},
    "OneCycleLR": {"max_lr": 0.3, "total_steps": 20},
}  # fmt: skip


def of_torch(name: str, steps: int) -> list[dict[str, Any]]:
    """What torch's own training loop would step with."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    scheduler = getattr(lr_scheduler, name)(optimizer, **CLASSES[name])
    found = []
    for _ in range(steps):
        found.append({key: optimizer.param_groups[0][key] for key in ("lr", "momentum")})
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name", CLASSES)
@given(steps=st.lists(st.integers(0, 18), min_size=1, max_size=8))
def test_any_step_in_any_order(name: str, steps: list[int]) -> None:
    args = {"lr": 0.1, "momentum": 0.9}
    schedule = LrSchedule(optimizer_config({"name": name, "args": CLASSES[name]}, args=args))
    expected = of_torch(name, 19)
    assert [schedule.at(step)[0] for step in steps] == [expected[step] for step in steps]


def test_what_was_stepped_with_is_reported() -> None:
    config = scheduled(run_config("conv", every=4, evaluate_every=0), groups=[])
    listener = Silent()
    plan = make_plan(config, [2, 1])
    LocalWorld(plan.num_ranks).run(lambda transport: train_rank(config, plan, transport, listener)[0])
    lr = config.optimizer.args["lr"]
    assert [r.learning_rate for r in listener.reports] == [pytest.approx(lr * factor(k)) for k in (2, 6, 10)]


def test_turns_start_from_the_rates_of_the_configuration() -> None:
    turns = [
        {"name": "ExponentialLR", "args": {"gamma": 0.5}, "length": 2},
        {"name": "ConstantLR", "args": {"factor": 1.0}, "length": 1},
        {"name": "StepLR", "args": {"step_size": 2}},
    ]
    schedule = LrSchedule(optimizer_config(*turns, args={"lr": 1.0}, groups=GROUPS))
    rates = [[knobs["lr"] for knobs in schedule.at(step)] for step in range(7)]
    shape = [1, 0.5, 1, 1, 1, 0.1, 0.1]
    assert rates == [[pytest.approx(lr * f) for lr in (1.0, 0.02)] for f in shape]


def test_epochs_and_where_a_run_goes_on() -> None:
    config = optimizer_config(
        {"name": "MultiStepLR", "args": {"milestones": [2, 3]}}, args={"lr": 1.0}, lr_interval="epoch"
    )
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "index": 0}], lr=1.0)
    rates = Rates(optimizer, config, microbatches=1, microbatches_per_update=2, lag=0, warmup=0)
    for epoch, expected in [(0, 1.0), (1, 1.0), (2, 0.1), (3, 0.01), (2, 0.1)]:
        rates.begin(6 * epoch, epoch)
        rates.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_run_goes_on_under_any_plan(replicas: int) -> None:
    """After 5 minibatches, which fill no round of 2 or 3 replicas, each update is at its first minibatch."""
    rising = {"name": "LinearLR", "args": {"start_factor": 0.1, "total_iters": 9}}
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "index": 0}], lr=1.0)
    config = optimizer_config(rising, args={"lr": 1.0})
    rates = Rates(optimizer, config, microbatches=4, microbatches_per_update=4 * replicas, lag=0, warmup=0)
    rates.begin(4 * 5, 0)
    for update in range(2):
        rates.step()
        expected = min(0.1 * (1 + 5 + replicas * update), 1.0)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)


def test_a_cycle_that_is_over_stays_at_its_end() -> None:
    cycle = {"name": "OneCycleLR", "args": {"max_lr": 1.0, "total_steps": 9}}
    schedule = LrSchedule(optimizer_config(cycle, args={"lr": 0.1, "momentum": 0.9}))
    assert schedule.at(12) == schedule.at(8)
    assert schedule.ends_early(9) == []
    assert "ends after 9 steps, the run has 10 for it" in schedule.ends_early(10)[0]


@pytest.mark.parametrize(("turns", "text"), [
    ([{"name": "CosinAnnealingLR"}], "name = 'CosinAnnealingLR' is no scheduler .* did you mean 'CosineAnn"),
    ([{"name": "LambdaLR"}], "'LambdaLR' is no scheduler of torch.optim.lr_scheduler that needs numbers"),
    ([{"name": "StepLR"}], "StepLR does not work with args = {}: .*step_size"),
    ([{"name": "StepLR", "args": {"step_size": 1}}] * 2, "StepLR is followed by another; set its length"),
    ([{"name": "StepLR", "args": {"step_size": 1}, "length": 3}], "is the last one .* leave its length out"),
    ([{"name": "StepLR", "args": {"step_size": 0}}], "do not work: ZeroDivisionError"),
    ([{"name": "StepLR", "args": {"step_size": "a"}}], "StepLR: step_size = 'a' is no number"),
    ([{"name": "ExponentialLR", "args": {"gamma": "x"}}], "ExponentialLR: gamma = 'x' is no number"),
    ([{"name": "CosineAnnealingLR", "args": {"T_max": 0}}], "do not work: ZeroDivisionError"),
    ([{"name": "MultiStepLR", "args": {"milestones": "ab"}}], "milestones = 'ab' is no number"),
    ([{"name": "MultiStepLR", "args": {"milestones": ["a"]}}], "milestones = .* holds more than numbers"),
    ([{"name": "StepLR", "args": {"step_size": 1, "last_epoch": 3}}], "the run's position sets last_epoch"),
    ([{"name": "OneCycleLR", "args": {"max_lr": 1.0, "total_steps": 9}}],
     "gives all groups one rate, but .* has its own; set max_lr to 2 rates"),
])  # fmt: skip
def test_what_cannot_work_is_refused(turns: list[dict[str, Any]], text: str) -> None:
    config = optimizer_config(*turns, args={"lr": 0.1, "momentum": 0.9}, groups=GROUPS)
    with pytest.raises(InputError, match=text):
        InputError.collect(lr_schedule_problems(config))


def test_a_momentum_that_nobody_asked_for_is_refused() -> None:
    cycle = {"name": "OneCycleLR", "args": {"max_lr": [1.0, 0.2], "total_steps": 9}}
    config = optimizer_config(cycle, args={"lr": 0.1}, groups=GROUPS)
    assert "set cycle_momentum = false" in lr_schedule_problems(config)[0]
    plain = {**cycle, "args": {**cycle["args"], "cycle_momentum": False}}
    assert not lr_schedule_problems(optimizer_config(plain, args={"lr": 0.1}, groups=GROUPS))


def test_they_are_refused_beside_all_else_that_does_not_fit() -> None:
    config = scheduled(run_config("conv"), lr_schedulers=[{"name": "StepLR"}])
    with pytest.raises(InputError, match="StepLR does not work"):
        check_fit(config, make_plan(config, [1, 1]), traced(config), 2)
