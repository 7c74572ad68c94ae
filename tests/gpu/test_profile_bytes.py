"""What a profile says that the graph of a forward takes is what the allocator gives it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from pdmpi.config.run import RunConfig  # noqa: E402
from pdmpi.graph.graph import INPUT  # noqa: E402
from pdmpi.model.build import build_stage  # noqa: E402
from pdmpi.model.example import cast_floating, dtype_of, example_batch  # noqa: E402
from pdmpi.model.factory import load_factory  # noqa: E402
from pdmpi.model.precision import autocasting  # noqa: E402
from pdmpi.runtime.capture import CudaCapturer  # noqa: E402
from pdmpi.runtime.profiling import profile_run  # noqa: E402
from pdmpi.runtime.setup import trace_run  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

WORDS = 30_000


def pictures_net() -> nn.Module:
    """Layers of one size: what one frees, the next takes."""
    blocks = [[nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()] for _ in range(4)]
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), *(layer for block in blocks for layer in block),
        nn.MaxPool2d(4), nn.Flatten(), nn.Linear(32 * 16 * 16, 10),
    )  # fmt: skip


def whole_net() -> nn.Module:
    """The same as one layer."""
    return nn.Sequential(pictures_net())


def words_net() -> nn.Module:
    """The scores are many and not saved; a norm and an activation are, in the middle."""
    return nn.Sequential(
        nn.Embedding(WORDS, 256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.LayerNorm(256),
        nn.Linear(256, WORDS),
    )  # fmt: skip


def pictures(split: str) -> TensorDataset:
    return TensorDataset(torch.randn(256, 3, 64, 64), torch.arange(256) % 10)


def words(split: str) -> TensorDataset:
    return TensorDataset(torch.arange(256 * 64).view(256, 64) % WORDS, torch.zeros(256, 64, dtype=torch.long))


def config_of(name: str, dtype: str) -> RunConfig:
    data, loss = (
        ("words", "pdmpi.model.zoo.losses:TokenCrossEntropy")
        if name == "words"
        else ("pictures", "torch.nn:CrossEntropyLoss")
    )
    return RunConfig.model_validate({
        "model": {"factory": f"test_profile_bytes:{name}_net", "leaves": ["*"] if name == "whole" else []},
        "data": {"factory": f"test_profile_bytes:{data}"}, "loss": {"factory": loss},
        "train": {"minibatch_size": 256, "epochs": 1, "evaluate_every": 0, "dtype": dtype},
    })  # fmt: skip


def pool_bytes(config: RunConfig) -> int:
    """Capture the forward of the whole model as training does, and return what its pool holds."""
    dtype, device = dtype_of(config), torch.device("cuda")
    source, target = cast_floating(example_batch(config), dtype, device)
    traced = trace_run(config)
    names = [layer.name for layer in traced.graph.layers if layer.kind != INPUT]
    stage = build_stage(traced, names, device=device, last=True)
    loss = load_factory(config.loss.factory)()
    values, kept = traced.flatten(source), []
    capturer = CudaCapturer()
    pool = capturer.new_pool()

    def forward() -> Any:
        with autocasting(dtype, device):
            return loss(traced.unflatten(stage(values, 0)), target)

    with torch.cuda.stream(torch.cuda.Stream()):
        forward().backward()
        capturer.settle()
        graph = capturer.capture(pool, lambda: kept.append(forward()))
        segments = torch.cuda.memory_snapshot()
        del graph
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(pool))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["pictures", "whole", "words"])
def test_what_a_forward_holds(name: str, dtype: str) -> None:
    config = config_of(name, dtype)
    profile = profile_run(config, device="cuda", budget_s=1.0)
    assert profile.is_graphed
    said = profile.graph_bytes(range(len(profile.costs))) + sum(c.saved_bytes for c in profile.costs)
    assert pool_bytes(config) == pytest.approx(said, rel=0.01, abs=24 << 20)  # pieces of 20 MiB and of 2
