"""Run on two ranks by test_cuda_graphs.py: what CUDA graphs promise besides the right weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from harness import Silent, make_plan, state_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pdmpi.config.run import RunConfig
from pdmpi.runtime.executor import Executor
from pdmpi.runtime.place import open_transport
from pdmpi.runtime.setup import load_datasets
from pdmpi.runtime.trainer import Position, Trainer


class Waits(nn.Module):
    """A layer that waits for the device, which no graph can hold."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            torch.cuda.current_stream().synchronize()
        return x * 2.0


class RollsDice(nn.Module):
    """A layer that draws on the host, which a graph would do once and never again."""

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(())
        return x * 2.0


def net(waits: bool = False, rolls: bool = False, width: int = 256) -> nn.Module:
    middle = Waits() if waits else nn.Tanh()
    further = [RollsDice()] if rolls else []
    return nn.Sequential(
        nn.Linear(64, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width), middle,
        nn.Linear(width, width), nn.Dropout(0.1), nn.GELU(), nn.Linear(width, 10), *further,
    )  # fmt: skip


def data(split: str = "train", samples: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 64, generator=generator)
    return TensorDataset(x, torch.randint(10, (samples,), generator=generator))


def config_of(graphs: Any, *, samples: int = 64, dtype: str = "float32", **model: Any) -> RunConfig:
    return RunConfig.model_validate({
        "model": {"factory": "graph_checks:net", "args": model, "leaves": ["*"]},
        "data": {"factory": "graph_checks:data", "args": {"samples": samples}},
        "optimizer": {"name": "AdamW", "args": {"lr": 1e-3}},
        "train": {"minibatch_size": 4, "epochs": 1, "evaluate_every": 0, "dtype": dtype},
        "runtime": {"cuda_graphs": graphs},
        "transport": {"share_devices": True},
        "checkpoint": {"enabled": False, "every_minibatches": 10000},
    })  # fmt: skip


def made(config: RunConfig, transport: Any, device: Any, replicas: list[int]) -> Trainer:
    plan = make_plan(config, replicas)
    return Trainer(config, plan, transport, load_datasets(config), Silent(), device)


def graphs_of(trainer: Trainer) -> tuple[int, str]:
    players = list(trainer.rank.players.values())
    return sum(getattr(p, "num_graphed", 0) for p in players), getattr(players[0], "why_eager", "")


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def without_waits(run: Any) -> Any:
    """Raise wherever a program waits for the device."""

    def strict(executor: Executor) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(executor)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return strict


def main() -> None:
    transport, device, _ = open_transport(config_of("auto"))
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        for replicas in ([1, 1], [2]):
            states = []
            for graphs in (False, "auto"):
                trainer = made(config_of(graphs, dtype=dtype), transport, device, replicas)
                trainer.epoch(Position())
                states.append(state_of(trainer))
            found[f"{dtype} {replicas}: largest difference from eager"] = difference(*states)
            found[f"{dtype} {replicas}: graphs"] = graphs_of(trainer)[0]

    for why in ("waits", "rolls"):
        trainer = made(config_of("auto", **{why: True}), transport, device, [1, 1])
        trainer.epoch(Position())
        eager = made(config_of(False, **{why: True}), transport, device, [1, 1])
        eager.epoch(Position())
        apart = difference(state_of(trainer), state_of(eager))
        found[f"falling back, {why}: largest difference from eager"] = apart
        found[f"falls back, {why}, since"] = graphs_of(trainer)[1]

    trainer = made(config_of(True, samples=4096), transport, device, [1, 1])
    position = trainer.epoch(Position())
    used = [torch.cuda.memory_reserved(), torch.cuda.memory_allocated()]
    with mock.patch.object(Executor, "run", without_waits(Executor.run)):
        trainer.epoch(position)
    grown = [torch.cuda.memory_reserved() - used[0], torch.cuda.memory_allocated() - used[1]]
    found["bytes more after 1024 minibatches more"] = grown
    found["segments of a fixed size"] = sum(
        not segment["is_expandable"] for segment in torch.cuda.memory_snapshot()
    )
    for part in transport.gather(json.dumps(found).encode()):
        print(part.decode(), flush=True)
    transport.close()


if __name__ == "__main__":
    main()
