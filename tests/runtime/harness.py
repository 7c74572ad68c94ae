"""Plans without a profile, and runs over either transport, for tests of the runtime."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdmpi.config.run import RunConfig
from pdmpi.graph.graph import INPUT
from pdmpi.model.stage import StageModule
from pdmpi.model.trace import TracedModel
from pdmpi.plan.cluster import Cluster, Level
from pdmpi.plan.plan import Placement, Plan, Prediction, ScheduleChoice, StagePlan
from pdmpi.plan.profile import LayerCost, Profile
from pdmpi.runtime import setup, trainer
from pdmpi.runtime.setup import load_datasets, trace_run
from pdmpi.runtime.trainer import Position, Trainer
from pdmpi.transport.base import Transport
from pdmpi.transport.local import LocalWorld

CPU = torch.device("cpu")

FORWARDS = threading.Lock()
"""torch has one random state a process: ranks that are threads draw their masks in turn."""


class Silent:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.scores: list[Any] = []
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def progress(self, epoch: int, done: int, total: int, loss: float) -> None:
        pass

    def segment(self, report: Any) -> None:
        self.reports.append(report)

    def evaluated(self, epoch: int, score: Any) -> None:
        self.scores.append(score)


def run_config(
    model: str, schedule: str = "pipedream", microbatches: int = 1, every: int = 1000, **train: Any
) -> RunConfig:
    data = {"conv": "images", "sequence": "tokens"}[model.partition("_")[0]]
    return RunConfig.model_validate(
        {
            "model": {"factory": f"oracle_models:{model}"},
            "data": {"factory": f"oracle_models:{data}"},
            "optimizer": {"name": "SGD", "args": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}},
            "schedule": {"name": schedule, "microbatches": microbatches},
            "checkpoint": {"every_minibatches": every},
            "train": {"minibatch_size": 4 * microbatches, "epochs": 1, "dtype": "float64", **train},
        }
    )


def make_plan(config: RunConfig, replicas: Sequence[int], chunks: int = 1) -> Plan:
    """Cut the model's layers evenly; with ``chunks`` each rank plays that many stages."""
    graph = traced(config).graph
    layers = [layer.name for layer in graph.layers if layer.kind != INPUT]
    inputs = [layer.name for layer in graph.layers if layer.kind == INPUT]
    num_stages = len(replicas)
    cuts = [round(i * len(layers) / num_stages) for i in range(num_stages + 1)]
    stages = [
        StagePlan(layers=tuple((inputs if s == 0 else []) + layers[cuts[s] : cuts[s + 1]]), replicas=r)
        for s, r in enumerate(replicas)
    ]
    ranks = num_stages // chunks
    placement, first = [], 0
    for s, r in enumerate(replicas):
        for replica in range(r):
            rank = first + replica if chunks == 1 else _chunk_rank(config.schedule.name, s, ranks)
            placement.append(Placement(stage=s, replica=replica, rank=rank, node=0, device=rank))
        first += r
    profile = Profile(
        graph=graph,
        costs=tuple(LayerCost(forward_s=1e-3, backward_s=2e-3, output_bytes=8) for _ in graph.layers),
        microbatch_size=config.train.minibatch_size // config.schedule.microbatches,
    )
    return Plan(
        profile=profile,
        cluster=Cluster(name="t", levels=(Level(name="l", count=sum(replicas), bandwidth_bytes_per_s=1e9),)),
        schedule=ScheduleChoice(
            name=config.schedule.name, microbatches=config.schedule.microbatches,
            extra_in_flight=int(config.schedule.extra_in_flight), recompute=config.schedule.recompute,
        ),
        stages=tuple(stages),
        placement=tuple(placement),
        prediction=Prediction(period_s=1.0, samples_per_s=1.0),
    )  # fmt: skip


def _chunk_rank(schedule: str, stage: int, ranks: int) -> int:
    turn, place = divmod(stage, ranks)
    return ranks - 1 - place if schedule == "zb-v" and turn % 2 else place


def train_rank(
    config: RunConfig,
    plan: Plan,
    transport: Transport,
    listener: Silent | None = None,
    device: torch.device = CPU,
) -> tuple[dict[str, Tensor], Trainer]:
    """Train one epoch on one rank and return its parameters and buffers by name."""
    training = Trainer(config, plan, transport, load_datasets(config), listener or Silent(), device)
    training.epoch(Position())
    if config.train.evaluate_every:
        training.evaluate(0)
    return state_of(training), training


def state_of(training: Trainer) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for player in training.rank.players.values():
        found.update({n: p.detach().clone() for n, p in player.module.named_parameters()})
        found.update({n: b.detach().clone() for n, b in player.module.named_buffers()})
    return found


@cache
def _traced(model: str, data: str, rows: int, dtype: str) -> TracedModel:
    return trace_run(
        RunConfig.model_validate(
            {
                "model": json.loads(model),
                "data": json.loads(data),
                "train": {"minibatch_size": rows, "epochs": 1, "dtype": dtype},
            }
        )
    )


def traced(config: RunConfig, dataset: Any = None) -> TracedModel:
    """Trace each model once: tests share what tracing does not change."""
    rows = config.train.minibatch_size // config.schedule.microbatches
    return _traced(config.model.model_dump_json(), config.data.model_dump_json(), rows, config.train.dtype)


def serialise_forwards(monkeypatch: Any, forwards: bool = True) -> None:
    """Let ranks that are threads build and run their stages one at a time; or only build them."""

    def serial(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with FORWARDS:
                return function(*args, **kwargs)

        return call

    if forwards:
        monkeypatch.setattr(StageModule, "forward", serial(StageModule.forward))
    monkeypatch.setattr(setup, "build_stage", serial(setup.build_stage))
    plain_feed = trainer.feed
    monkeypatch.setattr(trainer, "feed", lambda *args, **kwargs: serial(plain_feed(*args, **kwargs)))
    monkeypatch.setattr(trainer, "trace_run", serial(traced))


def train_local(
    config: RunConfig, plan: Plan, *, rendezvous: bool = True, seed: int | None = None
) -> list[dict[str, Tensor]]:
    """Train on ranks that are threads; return each rank's state."""
    world = LocalWorld(plan.num_ranks, rendezvous, seed=seed, timeout_s=600)  # it finds deadlocks at once
    return world.run(lambda transport: train_rank(config, plan, transport)[0])


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], context: str = "") -> None:
    """Compare in float64, to rounding."""
    for name, tensor in found.items():
        np.testing.assert_allclose(
            tensor.cpu().to(torch.float64).numpy(), expected[name].cpu().to(torch.float64).numpy(),
            rtol=1e-9, atol=1e-11, err_msg=f"{name} {context}",
        )  # fmt: skip
