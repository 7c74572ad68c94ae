"""Running statistics by whole minibatches: what one process has that sees a minibatch at once."""

from __future__ import annotations

import pytest
import torch
from harness import assert_same, make_plan, run_config, traced, train_local
from torch import Tensor, nn

from pdmpi.config.run import RunConfig
from pdmpi.model.build import build_stage
from pdmpi.model.factory import load_factory
from pdmpi.model.optimizer import make_optimizer
from pdmpi.plan.plan import Plan
from pdmpi.runtime.feed import epoch_order
from pdmpi.runtime.slots import host_memory
from pdmpi.runtime.statistics import MinibatchStatistics
from pdmpi.transport.local import LocalWorld

pytestmark = pytest.mark.usefixtures("one_random_state")

PARTS, SIZE, UPDATES = 4, 12, 4
PIXELS = 64
"""Every batch normalisation of the model sees maps of 8 x 8."""


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("shape", [(12, 5), (12, 5, 3), (12, 5, 4, 4)], ids=str)
def test_one_layer(shape: tuple[int, ...], momentum: float | None) -> None:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    whole, layer = (kind(5, momentum=momentum, dtype=torch.float64) for _ in range(2))
    statistics = MinibatchStatistics(nn.Sequential(layer), LocalWorld(1).transport(0), [0], host_memory)
    torch.manual_seed(0)
    for _ in range(3):
        batch = torch.randn(shape, dtype=torch.float64) * 3 + 7
        whole(batch)
        for part in batch.split([1, 5, 4, 2] if len(shape) > 2 else [2, 5, 3, 2]):
            layer(part)
            statistics.counts = False
            layer(part)  # recomputed
            statistics.counts = True
        statistics.commit()
    torch.testing.assert_close(layer.state_dict(), whole.state_dict(), rtol=1e-12, atol=1e-12)
    layer.eval(), whole.eval()
    torch.testing.assert_close(layer(batch), whole(batch), rtol=1e-12, atol=1e-12)


def one_process(config: RunConfig, plan: Plan) -> dict[str, Tensor]:
    """Step on minibatches of microbatches; combine the microbatches' own mean and unbiased variance."""
    trace = traced(config)
    model = build_stage(trace, [name for stage in plan.stages for name in stage.layers])
    norms = {n: part for n, part in model.named_modules() if isinstance(part, nn.BatchNorm2d)}
    kept = {n: (part.running_mean.clone(), part.running_var.clone()) for n, part in norms.items()}
    for part in norms.values():
        part.momentum = 1.0  # so that the running statistics are the last microbatch's own
    loss = load_factory(config.loss.factory)(**config.loss.args)
    dataset = load_factory(config.data.factory)(split="train", **config.data.args)
    order = epoch_order(len(dataset), config.train.seed, 0).tolist()
    optimizer = make_optimizer(config.optimizer, model.parameters())
    rows = SIZE // PARTS
    for update in range(UPDATES):
        seen: dict[str, list[tuple[Tensor, Tensor, int]]] = {n: [] for n in norms}
        optimizer.zero_grad()
        for k in range(update * PARTS, (update + 1) * PARTS):
            inputs, targets = zip(*(dataset[i] for i in order[k * rows : (k + 1) * rows]), strict=True)
            output = trace.unflatten(model(trace.flatten(torch.stack(inputs)), k))
            (loss(output, torch.stack(targets)) / PARTS).backward()
            for n, part in norms.items():
                seen[n].append((part.running_mean.clone(), part.running_var.clone(), rows * PIXELS))
        optimizer.step()
        for n, parts in seen.items():
            number = sum(size for *_, size in parts)
            mean = sum(size * own for own, _, size in parts) / number
            spread = sum((size - 1) * var + size * (own - mean) ** 2 for own, var, size in parts)
            kept[n] = tuple(
                0.9 * old + 0.1 * new for old, new in zip(kept[n], (mean, spread / (number - 1)), strict=True)
            )
    found = {n: p.detach() for n, p in model.named_parameters()}
    for n, (mean, var) in kept.items():
        found.update({f"{n}.running_mean": mean, f"{n}.running_var": var})
        found[f"{n}.num_batches_tracked"] = torch.tensor(UPDATES)
    return found


@pytest.mark.parametrize(("schedule", "replicas", "recompute"), [
    ("gpipe", [1, 1, 1], "always"), ("1f1b", [2, 1], "never"), ("1f1b", [1, 4], "never"),
], ids=str)  # fmt: skip
def test_equals_one_process(schedule: str, replicas: list[int], recompute: str) -> None:
    config = run_config("conv", schedule, PARTS, batch_norm="minibatch").model_dump()
    config["train"]["minibatch_size"] = SIZE
    config["schedule"]["recompute"] = recompute
    config = RunConfig.model_validate(config)
    plan = make_plan(config, replicas)
    expected = one_process(config, plan)
    for rank, state in enumerate(train_local(config, plan)):
        assert_same(state, expected, f"on rank {rank}")
