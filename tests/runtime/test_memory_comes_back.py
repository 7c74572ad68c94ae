"""A trainer that nobody refers to any more gives its memory back: weights, gradients, buckets."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from harness import Silent, make_plan, run_config

from pdmpi.runtime.setup import load_datasets
from pdmpi.runtime.trainer import Position, Trainer
from pdmpi.transport.base import Transport
from pdmpi.transport.local import LocalWorld


@pytest.mark.parametrize("replicas", [[1, 1], [2]])
def test_nothing_is_left(replicas: list[int]) -> None:
    config = run_config("conv", evaluate_every=0)
    plan = make_plan(config, replicas)
    left: list[weakref.ref[Any]] = []

    def train(transport: Transport) -> None:
        trainer = Trainer(config, plan, transport, load_datasets(config), Silent())
        trainer.epoch(Position())
        trainer.close()
        left.append(weakref.ref(trainer))
        for player in trainer.rank.players.values():
            left.append(weakref.ref(player.weights))
            left.extend(map(weakref.ref, player.weights.parameters.values()))
            left.extend(map(weakref.ref, player.weights.masters.values()))

    LocalWorld(2).run(train)
    gc.collect()
    assert len(left) > 10
    assert not [found for reference in left if (found := reference()) is not None]
