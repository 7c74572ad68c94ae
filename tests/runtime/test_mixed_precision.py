"""Sixteen-bit versions of float32 masters: what is stashed, what is stepped, what crosses a boundary."""

from __future__ import annotations

import pytest
import torch
from harness import Silent, make_plan, run_config, train_rank

from pdmpi.config.run import RunConfig
from pdmpi.transport.local import LocalWorld

pytestmark = pytest.mark.usefixtures("one_random_state")


@pytest.mark.parametrize("model", ["conv", "sequence"])
def test_masters_are_float32_and_versions_are_their_rounding(model: str) -> None:
    config = run_config(model, dtype="bfloat16", evaluate_every=0)
    plan = make_plan(config, [1, 1, 1])
    listeners = [Silent() for _ in range(3)]
    world = LocalWorld(3)
    ranks = world.run(lambda t: train_rank(config, plan, t, listeners[t.rank])[1].rank)
    for rank in ranks:
        for player in rank.players.values():
            ring = player.weights
            assert ring.num_slots == {0: 3, 1: 2, 2: 1}[next(iter(rank.players))]
            for name, master in ring.masters.items():
                assert master.dtype == torch.float32
                parameter = ring.parameters[name]
                assert parameter.dtype == torch.bfloat16
                assert torch.equal(parameter, master.to(torch.bfloat16))
    losses = list(listeners[0].reports[0].losses.values())
    assert all(torch.isfinite(torch.tensor(losses)))


def test_a_shared_parameter_has_one_master() -> None:
    """Under both of its names it is one tensor, stepped once with the sum of both gradients."""
    config = run_config("conv", dtype="bfloat16", evaluate_every=0).model_dump()
    config["model"]["factory"] = "oracle_models:tied"
    plan = make_plan(RunConfig.model_validate(config), [1])
    _, trainer = LocalWorld(1).run(lambda t: train_rank(RunConfig.model_validate(config), plan, t))[0]
    (player,) = trainer.rank.players.values()
    every = dict(player.module.named_parameters(remove_duplicate=False))
    assert len(player.weights.masters) == len(set(map(id, every.values()))) < len(every)
    for name, master in player.weights.masters.items():
        assert torch.equal(every[name], master.to(torch.bfloat16))


def test_small_steps_count() -> None:
    """A step far below the resolution of bfloat16 moves the master."""
    from pdmpi.runtime.weights import WeightRing

    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    ring = WeightRing({"w": parameter}, 2, lambda masters: torch.optim.SGD(masters.values(), lr=1.0))
    for step in range(100):
        parameter.grad = torch.full((4,), 1e-4, dtype=torch.bfloat16)
        ring.update(step % 2, (step + 1) % 2, 1.0)
    ring.rewind()
    torch.testing.assert_close(ring.masters["w"].detach(), torch.full((4,), 0.99), rtol=0, atol=1e-4)
    assert parameter[0] == torch.tensor(0.99).to(torch.bfloat16)
