"""Clipped gradients, updates left out after an overflow, groups of parameters: all equal one process."""

from __future__ import annotations

from dataclasses import replace
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
from oracle import replay

from pdmpi.config.run import RunConfig
from pdmpi.errors import InputError
from pdmpi.plan.plan import Plan, StagePlan
from pdmpi.runtime import limit
from pdmpi.runtime.loss_scale import LossScale
from pdmpi.runtime.setup import check_fit
from pdmpi.transport.local import LocalWorld

pytestmark = pytest.mark.usefixtures("one_random_state")

DECAY = {"match": ["*.bias", "*norm*", "1.*"], "args": {"weight_decay": 0.0}}
SLOW = {"match": ["*.weight"], "args": {"lr": 0.01, "momentum": 0.5}}


def configured(
    schedule: str, optimizer: dict[str, Any], model: str = "conv", factory: str = "", **train: Any
) -> RunConfig:
    parts = 1 if schedule in ("pipedream", "pipedream-vsync", "data-parallel") else 4
    found = run_config(model, schedule, parts, **train).model_dump()
    found["optimizer"].update(optimizer)
    if factory:
        found["model"]["factory"] = f"oracle_models:{factory}"
    if parts > 1:
        found["train"]["minibatch_size"] = 12
    return RunConfig.model_validate(found)


def check(config: RunConfig, plan: Plan) -> None:
    expected = replay(config, plan, [48 // config.train.minibatch_size])
    for rank, state in enumerate(train_local(config, plan)):
        assert_same(state, expected, f"on rank {rank}")


FLUSHED = [
    ("gpipe", [1, 1], 1), ("1f1b", [1, 1, 1], 1), ("1f1b", [2, 1], 1), ("zb-h1", [1, 1], 1),
    ("interleaved", [1, 1, 1, 1], 2), ("zb-v", [1, 1, 1, 1], 2), ("data-parallel", [2], 1),
]  # fmt: skip
ASYNCHRONOUS = [("pipedream", [2, 1], 1), ("2bw", [1, 1], 1)]


@pytest.mark.parametrize(("schedule", "replicas", "chunks"), FLUSHED + ASYNCHRONOUS, ids=str)
def test_clipped_gradients(schedule: str, replicas: list[int], chunks: int) -> None:
    """By the norm of the whole model where all stages update together, else by each stage's."""
    config = configured(schedule, {"clip_norm": 0.7})
    check(config, make_plan(config, replicas, chunks))


@pytest.mark.parametrize("optimizer", [{"clip_norm": 0.7}, {"groups": [DECAY]}], ids=str)
def test_the_options_change_something(optimizer: dict[str, Any]) -> None:
    plan = make_plan(configured("1f1b", {}), [1, 1])
    plain, changed = (replay(configured("1f1b", o), plan, [4]) for o in ({}, optimizer))
    assert not all(plain[name].equal(changed[name]) for name in plain)


def test_a_shared_parameter_counts_once() -> None:
    config = configured("1f1b", {"clip_norm": 0.05}, factory="tied")
    plan = make_plan(config, [1, 1])
    layers = [name for stage in plan.stages for name in stage.layers]
    stages = (StagePlan(layers=tuple(layers[:-1]), replicas=1), StagePlan(layers=(layers[-1],), replicas=1))
    check(config, replace(plan, stages=stages))


def test_a_frozen_stage_brings_nothing() -> None:
    config = configured("gpipe", {"clip_norm": 0.3}, factory="frozen")
    check(config, make_plan(config, [1, 1, 1]))


@pytest.mark.parametrize(("schedule", "says"), [
    ("1f1b", "limits the norm of all stages' gradients together"),
    ("pipedream", "limits each stage's gradients by themselves: schedule 'pipedream' updates stages at"),
])  # fmt: skip
def test_a_run_says_by_which_norm_it_clips(schedule: str, says: str) -> None:
    config = configured(schedule, {"clip_norm": 0.5}, evaluate_every=0)
    plan = make_plan(config, [1, 1])
    listener = Silent()
    LocalWorld(2).run(lambda transport: train_rank(config, plan, transport, listener)[0])
    assert any(says in line for line in listener.notices)


@pytest.mark.parametrize(("schedule", "replicas"), [("pipedream", [2, 1]), ("1f1b", [1, 1, 1])], ids=str)
def test_groups_of_parameters(schedule: str, replicas: list[int]) -> None:
    config = configured(schedule, {"groups": [DECAY, SLOW]})
    check(config, make_plan(config, replicas))


def test_groups_and_clipping_and_softened_rates_together() -> None:
    config = configured("pipedream", {"groups": [DECAY, SLOW], "clip_norm": 0.7})
    schedule = config.schedule.model_copy(update={"staleness_warmup": 7})
    config = config.model_copy(update={"schedule": schedule})
    check(config, make_plan(config, [1, 1, 1]))


@pytest.mark.parametrize(("groups", "message"), [
    ([{"match": ["*.bais"], "args": {}}], r"match = '\*.bais' matches no parameter of the model; it has '0"),
    ([{"match": ["*"], "args": {"wieght_decay": 0.0}}], "takes no 'wieght_decay'; did you mean 'weight"),
    ([{"match": ["*"], "args": {"lr": -1.0}}], r"\[\[optimizer.groups\]\] SGD does not work with args"),
])  # fmt: skip
def test_groups_that_cannot_be_meant_are_refused(groups: list[Any], message: str) -> None:
    config = configured("pipedream", {"groups": groups})
    with pytest.raises(InputError, match=message):
        check_fit(config, make_plan(config, [1, 1]), traced(config), 2)


@pytest.mark.parametrize(("schedule", "replicas", "chunks", "place"), [
    ("1f1b", [1, 1, 1], 1, "first"), ("1f1b", [2, 1], 1, "last"), ("interleaved", [1, 1, 1, 1], 2, "last"),
], ids=str)  # fmt: skip
def test_an_overflow_anywhere_is_left_out_everywhere(
    monkeypatch: pytest.MonkeyPatch, schedule: str, replicas: list[int], chunks: int, place: str
) -> None:
    """Proved in float64, where a scale of a power of two changes nothing else."""
    monkeypatch.setattr(limit, "scales_loss", lambda config: True)
    config = configured(schedule, {"clip_norm": 0.7}, factory=f"overflows_{place}", evaluate_every=0)
    plan = make_plan(config, replicas, chunks)
    world = LocalWorld(plan.num_ranks)
    runs = world.run(lambda transport: train_rank(config, plan, transport))
    assert [training.rank.loss_scale.state for _, training in runs] == [(2.0**15, 2)] * plan.num_ranks
    assert [training.rank.loss_scale.skipped for _, training in runs] == [1] * plan.num_ranks
    expected = replay(config, plan, [4], skipped=(2,))
    for rank, (state, _) in enumerate(runs):
        assert_same(state, expected, f"on rank {rank}")


def test_the_scale_halves_and_doubles() -> None:
    scale = LossScale()
    for _ in range(3):
        scale.learn(True)
    assert scale.state == (2.0**13, 0)
    for _ in range(1999):
        scale.learn(False)
    assert scale.state == (2.0**13, 1999)
    kept = LossScale()
    kept.state = scale.state
    kept.learn(False)
    assert kept.state == (2.0**14, 0)
    for _ in range(200):
        kept.learn(True)
    assert kept.value > 0


@pytest.mark.parametrize("model", ["conv", "sequence"])
def test_float16_trains(model: str) -> None:
    config = configured("1f1b", {"clip_norm": 1.0}, model, dtype="float16", epochs=1, evaluate_every=0)
    plan = make_plan(config, [1, 1])
    runs = LocalWorld(2).run(lambda transport: train_rank(config, plan, transport)[1].rank)
    assert len({rank.loss_scale.state for rank in runs}) == 1
    for rank in runs:
        for player in rank.players.values():
            for name, master in player.weights.masters.items():
                assert master.dtype == torch.float32
                assert torch.isfinite(master).all()
                assert torch.equal(player.weights.parameters[name], master.to(torch.float16))


def test_float16_is_refused_where_stages_update_at_different_times() -> None:
    config = configured("pipedream", {}, dtype="float16")
    with pytest.raises(InputError, match=r'dtype = "float16" needs one loss scale .* set dtype = "bfloat16"'):
        check_fit(config, make_plan(config, [1, 1]), traced(config), 2)
