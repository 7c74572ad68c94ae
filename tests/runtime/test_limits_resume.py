"""What clips, scales and groups goes on alike after a checkpoint, also under another plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Silent, assert_same, make_plan, run_config, state_of
from oracle import replay

from pdmpi.config.run import RunConfig
from pdmpi.runtime.keeper import Keeper
from pdmpi.runtime.setup import load_datasets
from pdmpi.runtime.trainer import Position, Trainer
from pdmpi.slurm.environment import JobEnvironment
from pdmpi.slurm.signals import StopRequest
from pdmpi.transport.base import Transport
from pdmpi.transport.local import LocalWorld

pytestmark = pytest.mark.usefixtures("one_random_state")


def configured(optimizer: dict[str, Any], **train: Any) -> RunConfig:
    found = run_config("conv", "1f1b", 4, every=2, epochs=None, evaluate_every=0, **train).model_dump()
    found["optimizer"].update(optimizer)
    found["train"]["minibatch_size"] = 12
    return RunConfig.model_validate(found)


def run(config: RunConfig, replicas: list[int], directory: Path) -> list[Trainer]:
    """Train until ``[train] steps``, from the newest checkpoint in the directory if there is one."""
    plan = make_plan(config, replicas)

    def main(transport: Transport) -> Trainer:
        trainer = Trainer(config, plan, transport, load_datasets(config), Silent())
        stop = StopRequest((), deadline_unix_s=None, margin_s=0.0, notice=lambda _: None)
        keeper = Keeper(
            config, plan, trainer, transport, run_dir=directory, job=JobEnvironment.of({}), stop=stop,
            notice=lambda _: None,
        )  # fmt: skip
        drained: list[Position] = [keeper.start("auto", None)]
        trainer.epoch(drained[0], drained.append)
        keeper.finish(drained[-1])
        return trainer

    return LocalWorld(plan.num_ranks).run(main)


GROUPS = [
    {"match": ["*.bias", "*norm*"], "args": {"weight_decay": 0.0}}, {"match": ["0.*"], "args": {"lr": 0.02}},
]  # fmt: skip


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_groups_clipping_and_rates_under_another_plan(name: str, tmp_path: Path) -> None:
    args = {"lr": 0.05, "weight_decay": 0.01, **({"momentum": 0.9} if name == "SGD" else {})}
    decay = {"name": "ExponentialLR", "args": {"gamma": 0.8}}
    optimizer = {"name": name, "args": args, "groups": GROUPS, "clip_norm": 0.7, "lr_schedulers": [decay]}
    run(configured(optimizer, steps=2), [1, 1], tmp_path)
    config = configured(optimizer, steps=4)
    trainers = run(config, [1, 2, 1], tmp_path)
    expected = replay(config, make_plan(config, [1]), [4], factor=lambda minibatch: 0.8**minibatch)
    for rank, trainer in enumerate(trainers):
        found = {n: t for n, t in state_of(trainer).items() if "running" not in n and "tracked" not in n}
        assert_same(found, expected, f"on rank {rank}")


def test_the_loss_scale_is_kept(tmp_path: Path) -> None:
    (first, *_) = run(configured({}, dtype="float16", steps=4), [1, 1], tmp_path)
    scale = first.rank.loss_scale
    assert scale.state != (2.0**16, 0)
    for trainer in run(configured({}, dtype="float16", steps=4), [1, 1, 1], tmp_path):
        assert trainer.rank.loss_scale.state == scale.state
        masters = trainer.rank.players[min(trainer.rank.players)].weights.masters.values()
        assert all(torch.isfinite(master).all() for master in masters)
