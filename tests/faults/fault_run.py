"""A small run that is interrupted in many ways: its model, its data, and how to start and compare it."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from launch import PDMPI, start
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from pdmpi.checkpoint import Checkpoint, latest, shard, writer
from pdmpi.config.load import load_config
from pdmpi.plan.cluster import Cluster, Device, Level
from pdmpi.plan.partition import partition
from pdmpi.plan.profile import LayerCost, Profile
from pdmpi.plan.store import save_plan
from pdmpi.runtime.setup import trace_run

CONFIG = """
[model]
factory = "faults.fault_run:net"
[data]
factory = "faults.fault_run:data"
[optimizer]
name = "AdamW"
args = {{ lr = 0.005 }}
[train]
minibatch_size = 8
steps = {steps}
seed = 3
evaluate_every = 0
[runtime]
stall_timeout_s = 60
silence_timeout_s = 60
[checkpoint]
every_minibatches = 6
every_s = 0
margin_s = 5
"""


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 12, batch_first=True)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.lstm(x)[0]).mean(1)


def net() -> nn.Module:
    """Layers with state of every kind: running statistics, masks, a frozen part, moments of AdamW."""
    frozen = nn.Linear(12, 12)
    frozen.requires_grad_(False)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2),
        nn.Flatten(2), nn.Conv1d(4, 4, 1), nn.Linear(64, 16), Recurrent(), frozen, nn.Dropout(0.1),
        nn.Linear(12, 4),
    )  # fmt: skip


PAUSE = "FAULT_RUN_PAUSE_S"
"""Variable with the seconds that each sample takes: it bounds how far a run comes between two faults."""

SLOW_DISK = "FAULT_RUN_SLOW_DISK_S"
"""Variable with the seconds that each shard takes to be written."""


class Augmented(Dataset):
    """Shifts and noise from all three generators that people use."""

    def __init__(self, samples: TensorDataset) -> None:
        self._samples = samples
        self._pause_s = float(os.environ.get(PAUSE, "0"))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._pause_s)
        image, target = self._samples[index]
        noisy = image + 0.1 * torch.randn(image.shape) + 0.1 * np.random.rand()
        return noisy.roll(random.randint(0, 1), -1), target


def data(split: str) -> Augmented:
    """Noise on one of four patterns."""
    if os.environ.get(SLOW_DISK):
        writer.write_shard = _slow_write
    rng = np.random.default_rng(split == "train")
    patterns, targets = rng.standard_normal((4, 1, 8, 8)), rng.integers(0, 4, 200)
    inputs = 2 * patterns[targets] + rng.standard_normal((200, 1, 8, 8))
    return Augmented(TensorDataset(torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(targets)))


def _slow_write(*arguments):
    time.sleep(float(os.environ[SLOW_DISK]))
    return shard.write_shard(*arguments)


def make_run(directory: Path, steps: int, *shapes: tuple[int, ...], per_node: int = 1) -> None:
    """Write ``run.toml`` and a plan ``2-1.h5`` for each shape, of nodes with so many devices.

    The layers' times are made up: plans need not be good here, and nothing hangs on this machine's speed.
    """
    (directory / "run.toml").write_text(CONFIG.format(steps=steps))
    traced = trace_run(load_config(directory / "run.toml"))
    cost = LayerCost(forward_s=1e-3, backward_s=2e-3, output_bytes=4096, parameter_bytes=4096)
    profile = Profile(graph=traced.graph, costs=(cost,) * len(traced.graph), microbatch_size=8)
    for shape in shapes:
        inner = min(per_node, sum(shape))
        levels = tuple(
            Level(name=name, count=count, bandwidth_bytes_per_s=1e9, latency_s=1e-5)
            for name, count in (("host", inner), ("network", -(-sum(shape) // inner)))
        )
        device = Device(name="cpu", memory_bytes=1 << 30)
        cluster = Cluster(name="test", levels=levels, devices=(device,), devices_per_node=inner)
        name = "-".join(map(str, shape))
        save_plan(partition(profile, cluster, shape=shape), directory / f"{name}.h5", force=True)


def arguments(directory: Path, shape: str, run_dir: Path, *more: object) -> list[str]:
    """Return what comes after ``python``."""
    plan = directory / f"{shape}.h5"
    train = ("train", directory / "run.toml", "--plan", plan, "--run-dir", run_dir, *more)
    return [*PDMPI, *map(str, train)]


def ranks_of(shape: str) -> int:
    return sum(map(int, shape.split("-")))


def train(directory: Path, shape: str, run_dir: Path, *more: object, timeout_s: float = 600.0, **options):
    """Run to the end and return (exit code, everything that was printed)."""
    job = start(ranks_of(shape), arguments(directory, shape, run_dir, *more), **options)
    stdout, stderr = job.communicate(timeout=timeout_s)
    return job.returncode, stdout + stderr


def newest(run_dir: Path) -> Checkpoint:
    found = latest(run_dir)
    assert found is not None, f"{run_dir} holds no checkpoint"
    return found


def losses(run_dir: Path) -> list[tuple[int, int, float]]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(r["epoch"], r["minibatch"], r["loss"]) for r in records if r["kind"] == "loss"]


def assert_same_run(one: Path, other: Path) -> None:
    """The newest checkpoints are bitwise the same, and so are all losses, each minibatch once."""
    assert_same_state(newest(one), newest(other))
    assert losses(one) == losses(other)


def assert_same_state(one: Checkpoint, other: Checkpoint) -> None:
    assert one.manifest.minibatch == other.manifest.minibatch
    positions = [[c.manifest.state[key] for key in ("epoch", "minibatch", "total")] for c in (one, other)]
    assert positions[0] == positions[1]
    a, b = (dict(c.read(c.names).items()) for c in (one, other))
    assert a.keys() == b.keys()
    assert [name for name in a if not a[name].equals(b[name])] == []
    assert any(name.startswith("optimizer/") for name in a)
