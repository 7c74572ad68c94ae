"""Models that are not all trained, all used, or all with parameters; and runs that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import assert_same, make_plan, run_config, train_local
from oracle import replay

from pdmpi.config.run import RunConfig
from pdmpi.errors import InputError, PdmpiError

pytestmark = pytest.mark.usefixtures("one_random_state")


def configured(model: str, args: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    config = run_config("conv", **train)
    named = config.model.model_copy(update={"factory": f"oracle_models:{model}", "args": args or {}})
    return config.model_copy(update={"model": named})


@pytest.mark.parametrize("replicas", [[1, 1], [2, 1], [1, 2]], ids=str)
@pytest.mark.parametrize("model", ["unused", "frozen"])
def test_equals_one_process(model: str, replicas: list[int]) -> None:
    """Weight decay moves no parameter that nobody reads; nothing is sent to a frozen stage."""
    config = configured(model)
    plan = make_plan(config, replicas)
    expected = replay(config, plan, [12])
    for state in train_local(config, plan):
        assert_same(state, expected)
    if model == "unused":
        assert torch.equal(expected["1.spare"], torch.ones(3, dtype=torch.float64))


def test_a_frozen_batch_norm_stays_frozen() -> None:
    config = configured("fixed_statistics")
    states = train_local(config, make_plan(config, [1, 1]))
    merged = {name: tensor for state in states for name, tensor in state.items()}
    assert torch.equal(merged["0.norm.running_mean"], torch.zeros(4, dtype=torch.float64))
    assert merged["0.norm.num_batches_tracked"] == 0


def test_a_stage_without_parameters_in_sixteen_bits() -> None:
    config = configured("fixed_statistics", dtype="bfloat16")
    plan = make_plan(config, [1, 1, 1, 1])
    assert len(train_local(config, plan)) == 4


def with_terms(schedule: str, parts: int, args: dict[str, Any], **train: Any) -> RunConfig:
    found = run_config("conv", schedule, parts, **train).model_dump()
    found["model"] |= {"factory": "oracle_models:several_terms", "args": args}
    found["loss"] = {"factory": "oracle_models:terms", "args": {}}
    return RunConfig.model_validate(found)


@pytest.mark.parametrize(("schedule", "parts", "replicas"), [
    ("pipedream", 1, [2, 1]), ("gpipe", 4, [1, 1, 1, 1]),
], ids=str)  # fmt: skip
def test_terms_of_the_loss_that_inner_stages_make(schedule: str, parts: int, replicas: list[int]) -> None:
    """A balance term of no dimensions, a side head's scores and a custom autograd function."""
    config = with_terms(schedule, parts, {}, evaluate_every=0)
    plan = make_plan(config, replicas)
    expected = replay(config, plan, [48 // config.train.minibatch_size])
    for state in train_local(config, plan):
        assert_same(state, expected)


def test_a_value_without_rows_is_refused_where_the_test_set_does_not_fill_microbatches() -> None:
    config = with_terms("pipedream", 1, {})
    message = r"13 samples, which do not fill microbatches of 4, .* of shape \(\), .* give it 12 samples"
    with pytest.raises(InputError, match=message):
        train_local(config, make_plan(config, [1, 1]))
    config = with_terms("pipedream", 1, {"always": False})
    train_local(config, make_plan(config, [1, 1]))


def test_layers_that_must_not_run_twice_are_refused_before_anything_runs() -> None:
    config = configured("spectral", evaluate_every=0)
    schedule = config.schedule.model_copy(update={"recompute": "always"})
    config = config.model_copy(update={"schedule": schedule})
    with pytest.raises(InputError, match=r"layer '1' of stage 0 changes the buffers .* = \"never\""):
        train_local(config, make_plan(config, [1, 1]))


def test_a_batch_of_another_shape_is_no_broadcast() -> None:
    config = configured("unused", evaluate_every=0)
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"factory": "oracle_models:ragged"})}
    )
    with pytest.raises(PdmpiError, match=r"returned shape \(4, 1\) where \(4, 64\) was traced"):
        train_local(config, make_plan(config, [1, 1, 1, 1, 1]))


@pytest.mark.parametrize(
    ("config", "replicas", "message"),
    [
        (configured("frozen", {"everything": True}), [1, 1], "trains nothing"),
        (configured("tied"), [1, 1, 1], "shared parameter"),
        (run_config("conv", epochs=None, steps=5), [2, 1], r"steps = 5 .* set it to 4 or 6"),
        (run_config("conv", epochs=None, steps=1), [2, 1], r"steps = 1 .* set it to 2"),
    ],
    ids=["nothing to train", "tied over stages", "steps", "too few steps"],
)
def test_refused(config: RunConfig, replicas: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        train_local(config, make_plan(config, replicas))
