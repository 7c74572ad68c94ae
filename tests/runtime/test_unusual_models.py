"""Models that are not all trained, all used, or all with parameters; and runs that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import assert_same, make_plan, run_config, serialise_forwards, train_local
from oracle import replay

from pdmpi.config.run import RunConfig
from pdmpi.errors import InputError


@pytest.fixture(autouse=True)
def _one_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    serialise_forwards(monkeypatch)


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
