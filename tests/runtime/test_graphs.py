"""A stage that is captured once for each set of slots and replayed leaves what an eager one leaves."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from harness import assert_same, make_plan, run_config, serialise_forwards, train_rank
from oracle import replay
from tape import TapeCapturer

from pdmpi.runtime import setup
from pdmpi.runtime.graphs import GraphedPlayer
from pdmpi.runtime.slots import Region
from pdmpi.transport.local import LocalWorld

CASES = [
    ("pipedream", 1, [1]), ("pipedream", 1, [1, 1, 1]), ("pipedream-vsync", 1, [1, 1]),
    ("2bw", 4, [1, 1]), ("gpipe", 4, [1, 1]), ("1f1b", 4, [1, 1, 1]),
]  # fmt: skip

MODELS = ("conv", "sequence")

RUNS = [(*case, model, (i + j) % 2 == 0) for i, case in enumerate(CASES) for j, model in enumerate(MODELS)]
"""Each case with each model, each schedule with updates captured and not, each model with both."""


@pytest.fixture(autouse=True)
def _on_tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions without headers, which graphs do not write; one random state."""
    serialise_forwards(monkeypatch)
    monkeypatch.setattr(Region, "stamp", lambda *_: None)
    monkeypatch.setattr(Region, "check", lambda *_: None)
    monkeypatch.setattr(Region, "loss", float("nan"))


def trained(monkeypatch: pytest.MonkeyPatch, config: Any, plan: Any, graph_updates: bool) -> list[Any]:
    played = partial(GraphedPlayer, capturer=TapeCapturer(), graph_updates=graph_updates, insist=True)
    monkeypatch.setattr(setup, "Player", played)
    return LocalWorld(plan.num_ranks).run(lambda transport: train_rank(config, plan, transport))


@pytest.mark.parametrize(("schedule", "microbatches", "replicas", "model", "graph_updates"), RUNS, ids=str)
def test_equals_the_oracle(
    schedule: str, microbatches: int, replicas: list[int], model: str, graph_updates: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = run_config(model, schedule, microbatches, evaluate_every=0, minibatch_size=4)
    plan = make_plan(config, replicas)
    results = trained(monkeypatch, config, plan, graph_updates)
    expected = replay(config, plan, [48 // config.train.minibatch_size])
    for rank, (state, trainer) in enumerate(results):
        assert_same(state, expected, f"on rank {rank}")
        for player in trainer.rank.players.values():
            assert player.num_graphed
            assert not player.why_eager
