"""A stage that is captured once for each set of slots and replayed leaves what an eager one leaves."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from harness import assert_same, make_plan, run_config, serialise_forwards, train_rank
from oracle import replay
from tape import TapeCapturer
from torch import nn

from pdmpi.config.run import LrSchedulerConfig
from pdmpi.model.generator import draws_by_cudnn
from pdmpi.runtime import graphs, setup, waiting
from pdmpi.runtime.graphs import GraphedPlayer
from pdmpi.runtime.slots import Region
from pdmpi.transport.local import LocalWorld

CASES = [
    ("pipedream", 1, [1]), ("pipedream", 1, [1, 1, 1]), ("pipedream-vsync", 1, [1, 1]),
    ("2bw", 4, [1, 1]), ("gpipe", 4, [1, 1]), ("1f1b", 4, [1, 1, 1]), ("zb-h1", 4, [1, 1]),
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


def trained(
    monkeypatch: pytest.MonkeyPatch, config: Any, plan: Any, graph_updates: bool, insist: bool = True
) -> list[Any]:
    played = partial(GraphedPlayer, capturer=TapeCapturer(), graph_updates=graph_updates, insist=insist)
    monkeypatch.setattr(setup, "Player", played)
    return LocalWorld(plan.num_ranks).run(lambda transport: train_rank(config, plan, transport))


def checked(config: Any, plan: Any, results: list[Any]) -> list[GraphedPlayer]:
    """Compare with the oracle, and return all players."""
    expected = replay(config, plan, [48 // config.train.minibatch_size])
    for rank, (state, _) in enumerate(results):
        assert_same(state, expected, f"on rank {rank}")
    return [player for _, trainer in results for player in trainer.rank.players.values()]


@pytest.mark.parametrize(("schedule", "microbatches", "replicas", "model", "graph_updates"), RUNS, ids=str)
def test_equals_the_oracle(
    schedule: str, microbatches: int, replicas: list[int], model: str, graph_updates: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = run_config(model, schedule, microbatches, evaluate_every=0, minibatch_size=4)
    plan = make_plan(config, replicas)
    for player in checked(config, plan, trained(monkeypatch, config, plan, graph_updates)):
        assert player.num_graphed
        assert not player.why_eager


@pytest.mark.parametrize(("most", "small_bytes"), [(1, 0), (2, 400), (3, 1 << 20)])
@pytest.mark.parametrize("schedule", ["2bw", "gpipe", "1f1b", "zb-h1"])
def test_an_update_of_which_some_microbatches_are_graphed(
    schedule: str, most: int, small_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_MOST_GRAPHED", most)
    monkeypatch.setattr(waiting, "_SMALL_BYTES", small_bytes)
    config = run_config("conv", schedule, 4, evaluate_every=0, minibatch_size=4)
    plan = make_plan(config, [1, 1])
    for player in checked(config, plan, trained(monkeypatch, config, plan, True)):
        assert player.num_graphed == most
        assert not player.why_eager
        assert player.why_partly == f"the program uses more than {most} sets of slots"


@pytest.mark.parametrize("graph_updates", [True, False])
def test_backwards_in_two_parts_deep_in_a_pipeline(
    graph_updates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config("conv", "zb-h1", 4, evaluate_every=0, minibatch_size=4)
    plan = make_plan(config, [1, 1, 1])
    players = checked(config, plan, trained(monkeypatch, config, plan, graph_updates))
    assert [bool(p.num_graphed) for p in players] == [True] * 3
    assert all(one.backward_input is not None for p in players for one in p._graphs.values())


@pytest.mark.parametrize("small_bytes", [0, 400])
def test_several_stages_a_rank(small_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_SMALL_BYTES", small_bytes)
    config = run_config("conv", "zb-v", 4, evaluate_every=0, minibatch_size=4)
    plan = make_plan(config, [1, 1, 1, 1], chunks=2)
    players = checked(config, plan, trained(monkeypatch, config, plan, True))
    assert [bool(p.num_graphed) for p in players] == [True] * 4


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "zb-h1"])
@pytest.mark.parametrize("fails", [1, 4, 7])
def test_what_is_played_by_graphs_already_goes_on_when_a_capture_fails(
    schedule: str, fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(TapeCapturer):
        def capture(self, *args: Any) -> Any:
            if len(self.tapes) >= fails:
                raise RuntimeError("CUDA out of memory")
            return super().capture(*args)

    monkeypatch.setattr("test_graphs.TapeCapturer", Fails)
    config = run_config("conv", schedule, 4, evaluate_every=0, minibatch_size=4)
    plan = make_plan(config, [1, 1])
    for player in checked(config, plan, trained(monkeypatch, config, plan, True, insist=False)):
        assert player.why_eager == "CUDA out of memory"
        assert not player._waiting._places, "given back"


def test_a_backward_that_cannot_be_split_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU an LSTM reads its weights at every step."""
    config = run_config("sequence", "zb-h1", 4, evaluate_every=0, minibatch_size=4)
    plan = make_plan(config, [1, 1, 1])
    players = checked(config, plan, trained(monkeypatch, config, plan, True, insist=False))
    assert any("used twice" in player.why_eager for player in players)
    assert all(bool(player.num_graphed) != bool(player.why_eager) for player in players)


def test_rates_that_change_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config("conv", "pipedream", evaluate_every=0, minibatch_size=4)
    turn = LrSchedulerConfig(name="ExponentialLR", args={"gamma": 0.8})
    rates = config.optimizer.model_copy(update={"lr_schedulers": (turn,)})
    config = config.model_copy(update={"optimizer": rates})
    plan = make_plan(config, [1, 1])
    expected = replay(config, plan, [12], factor=lambda minibatch: 0.8**minibatch)
    for state, trainer in trained(monkeypatch, config, plan, graph_updates=False):
        assert_same(state, expected, "with rates that change")
        assert all(player.num_graphed for player in trainer.rank.players.values())


@pytest.mark.parametrize("model", MODELS)
def test_recomputed_masks_are_the_same(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(model, "gpipe", 4, evaluate_every=0, minibatch_size=4)
    recomputing = config.schedule.model_copy(update={"recompute": "always"})
    config = config.model_copy(update={"schedule": recomputing})
    plan = make_plan(config, [1, 1])
    for player in checked(config, plan, trained(monkeypatch, config, plan, True)):
        assert player.num_graphed
        assert all(one.recompute is not None for one in player._graphs.values())


@pytest.mark.parametrize(
    ("eager", "partly", "text"),
    [
        ("a wait", "", "CUDA graphs are off, kernels are launched one by one: a wait"),
        (
            "",
            "too many",
            "CUDA graphs play some microbatches only, kernels are launched one by one: too many",
        ),
    ],
)
def test_the_user_hears_once_what_is_not_graphed(
    eager: str, partly: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config("conv", evaluate_every=0, minibatch_size=4)
    plan, told = make_plan(config, [1]), list[str]()

    def run(transport: Any) -> None:
        _, trainer = train_rank(config, plan, transport)
        (player,) = trainer.rank.players.values()
        player.why_eager, player.why_partly = eager, partly
        monkeypatch.setattr(trainer._listener, "notice", told.append)
        trainer._tell_why_eager()
        trainer._tell_why_eager()

    LocalWorld(1).run(run)
    assert told == [text]


def test_what_would_draw_the_same_numbers_in_every_replay_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config("sequence", evaluate_every=0, minibatch_size=4)
    plan = make_plan(config, [1])
    states = iter(range(1_000_000))
    monkeypatch.setattr(graphs, "device_state", lambda: torch.tensor(next(states)))
    (player,) = checked(config, plan, trained(monkeypatch, config, plan, True, insist=False))
    assert player.why_eager == "the loss draws random numbers"
    assert not player.num_graphed

    assert draws_by_cudnn(nn.Sequential(nn.LSTM(4, 4, num_layers=2, dropout=0.1)))
    assert not draws_by_cudnn(nn.Sequential(nn.LSTM(4, 4, num_layers=2), nn.Dropout(0.1)))
    monkeypatch.setattr(graphs, "draws_by_cudnn", lambda _: True)
    (player,) = checked(config, plan, trained(monkeypatch, config, plan, True, insist=False))
    assert "cuDNN" in player.why_eager
    assert not player.num_graphed
