"""Batch normalisation over replicas: what one process has that runs their microbatches as one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_same, make_plan, run_config, serialise_forwards, traced, train_local
from torch import Tensor, nn

from pdmpi.config.run import RunConfig
from pdmpi.errors import InputError, PdmpiError
from pdmpi.model.build import build_stage
from pdmpi.model.factory import load_factory
from pdmpi.model.optimizer import make_optimizer
from pdmpi.plan.plan import Plan
from pdmpi.runtime.feed import epoch_order
from pdmpi.runtime.joint_norm import JointNormalisation
from pdmpi.runtime.slots import host_memory
from pdmpi.transport.base import Transport
from pdmpi.transport.local import LocalWorld

PARTS, SIZE, UPDATES = 4, 12, 4


@pytest.fixture(autouse=True)
def _built_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    serialise_forwards(monkeypatch, forwards=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(12, 5), (12, 5, 3), (12, 5, 4, 4), (12, 5, 2, 3, 2)], ids=str)
def test_one_layer(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Three replicas hold the thirds of a batch: outputs, gradients and statistics are the batch's."""
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    torch.manual_seed(0)
    whole = kinds[len(shape)](5, affine=len(shape) != 3, momentum=None if len(shape) == 2 else 0.1)
    whole = whole.to(torch.float64 if dtype == torch.float64 else torch.float32)
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    batch = (torch.randn(shape, dtype=torch.float64) * 3 + 7).to(dtype)
    weights = torch.randn(shape, dtype=torch.float64).to(dtype)
    layers = [copy.deepcopy(whole) for _ in range(3)]

    def replica(transport: Transport) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        transport.prepare([range(3)], ["float64"])
        layer = layers[transport.rank]
        joint = JointNormalisation(layer, transport, [0, 1, 2], host_memory)
        mine = batch.chunk(3)[transport.rank].clone().requires_grad_()
        with joint.running(0, leaves=True, takes=False), torch.no_grad():
            layer(mine)
        with joint.running(0, leaves=False, takes=True):
            made = layer(mine)
        made.backward(weights.chunk(3)[transport.rank])
        joint.check()
        return made.detach(), mine.grad, [p.grad for p in layer.parameters() if p.grad is not None]

    found = LocalWorld(3).run(replica)
    exact = batch.clone().requires_grad_()
    expected = whole(exact)
    expected.backward(weights)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]

    def close(a: Tensor, b: Tensor | None) -> None:
        assert b is not None
        torch.testing.assert_close(a, b.to(a.dtype), rtol=tolerance, atol=tolerance * 10)

    close(torch.cat([made for made, *_ in found]), expected.detach())
    close(torch.cat([gradient for _, gradient, _ in found if gradient is not None]), exact.grad)
    for position, parameter in enumerate(whole.parameters()):
        close(torch.stack([of[position] for *_, of in found]).sum(0), parameter.grad)
    for layer in layers:
        for name, buffer in whole.named_buffers():
            close(dict(layer.named_buffers())[name], buffer)
    layers[0].eval(), whole.eval()
    close(layers[0](batch), whole(batch))


def one_process(config: RunConfig, plan: Plan, together: int) -> dict[str, Tensor]:
    """Step on minibatches of parts, each of which is the microbatches of one turn in one batch."""
    trace = traced(config)
    model = build_stage(trace, [name for stage in plan.stages for name in stage.layers])
    loss = load_factory(config.loss.factory)(**config.loss.args)
    dataset = load_factory(config.data.factory)(split="train", **config.data.args)
    order = epoch_order(len(dataset), config.train.seed, 0).tolist()
    optimizer = make_optimizer(config.optimizer, model.parameters())
    rows = SIZE // PARTS * together
    for update in range(UPDATES):
        optimizer.zero_grad()
        for part in range(PARTS // together):
            first = update * SIZE + part * rows
            inputs, targets = zip(*(dataset[i] for i in order[first : first + rows]), strict=True)
            output = trace.unflatten(model(trace.flatten(torch.stack(inputs)), 0))
            (loss(output, torch.stack(targets)) * together / PARTS).backward()
        optimizer.step()
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def configured(schedule: str, recompute: str = "never") -> RunConfig:
    given = run_config("conv_without_draws", schedule, PARTS, batch_norm="synchronised").model_dump()
    given["train"]["minibatch_size"] = SIZE
    given["schedule"]["recompute"] = recompute
    return RunConfig.model_validate(given)


@pytest.mark.parametrize(("schedule", "replicas", "recompute"), [
    ("gpipe", [2, 2], "always"), ("1f1b", [2, 2, 2], "never"), ("1f1b", [4], "always"),
], ids=str)  # fmt: skip
def test_equals_one_process(schedule: str, replicas: list[int], recompute: str) -> None:
    config = configured(schedule, recompute)
    plan = make_plan(config, replicas)
    expected = {name: held.detach() for name, held in one_process(config, plan, replicas[0]).items()}
    for rank, state in enumerate(train_local(config, plan)):
        assert_same(state, expected, f"on rank {rank}")


def test_alone_they_differ() -> None:
    """The test above can fail: replicas that normalise by themselves train other weights."""
    config = configured("1f1b")
    config = config.model_copy(update={"train": config.train.model_copy(update={"batch_norm": "microbatch"})})
    plan = make_plan(config, [2, 2])
    expected = {name: held.detach() for name, held in one_process(config, plan, 2).items()}
    with pytest.raises(AssertionError):
        assert_same(train_local(config, plan)[0], expected)


def test_replicas_that_would_wait_for_ever_are_refused_with_the_remedy() -> None:
    given = configured("1f1b").model_dump()
    given["schedule"]["microbatches"] = 6
    with pytest.raises(InputError, match=r"for ever, since schedule '1f1b' .* --extra-in-flight 1$"):
        trained(given)
    given["schedule"]["extra_in_flight"] = 1
    assert all(tensor.isfinite().all() for state in trained(given) for tensor in state.values())


def trained(given: dict[str, Any]) -> list[dict[str, Tensor]]:
    config = RunConfig.model_validate(given)
    return train_local(config, make_plan(config, [1, 3, 1]))


@pytest.mark.parametrize(("schedule", "why"), [("pipedream", "does not flush"), ("zb-h1", "in two parts")])
def test_refused(schedule: str, why: str) -> None:
    config = configured(schedule) if schedule != "pipedream" else run_config(
        "conv_without_draws", batch_norm="synchronised"
    )  # fmt: skip
    with pytest.raises(InputError, match=f"batch_norm = \"synchronised\", but schedule '{schedule}' .*{why}"):
        train_local(config, make_plan(config, [2, 2]))


class Own(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class ByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if x.sum() > 0 else x


class Around(nn.Module):
    """What is no Sequential is looked into."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.conv, self.inner, self.head = nn.Conv2d(1, 4, 3), inner, nn.Linear(4 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.conv(x)).flatten(1))


def own() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), Own(4), nn.Flatten(), nn.Linear(4 * 36, 10))


def by_hand() -> nn.Module:
    return Around(ByHand())


def decides() -> nn.Module:
    return Around(Decides())


@pytest.mark.parametrize(("factory", "why"), [
    ("own", "Own has a forward of its own"), ("by_hand", "batch_norm is called as a function"),
    ("decides", "a batch normalisation runs where what it does depends on the values of a tensor"),
])  # fmt: skip
def test_layers_that_cannot_are_refused(factory: str, why: str) -> None:
    given = configured("1f1b").model_dump()
    given["model"]["factory"] = f"test_joint_norm:{factory}"
    config = RunConfig.model_validate(given)
    with pytest.raises(InputError, match=f"{why}.* in layer '.*', which has replicas; set it to"):
        train_local(config, make_plan(config, [2]))
    plain = config.model_copy(update={"train": config.train.model_copy(update={"batch_norm": "microbatch"})})
    assert len(train_local(plain, make_plan(plain, [2]))) == 2


def test_replicas_that_run_different_layers_do_not_train_on() -> None:
    def replica(transport: Transport) -> None:
        transport.prepare([range(2)], ["float64"])
        layers = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
        joint = JointNormalisation(layers, transport, [0, 1], host_memory)
        with joint.running(0, leaves=False, takes=False):
            layers[transport.rank](torch.randn(4, 3))
        joint.check()

    with pytest.raises(PdmpiError, match="ran different batch normalisations at the same time"):
        LocalWorld(2).run(replica)


def test_a_second_run_in_the_backward_is_refused() -> None:
    layer = nn.BatchNorm1d(3)
    JointNormalisation(layer, LocalWorld(1).transport(0), [0], host_memory)
    with pytest.raises(InputError, match=r"torch.utils.checkpoint.*leave that to \[schedule\] recompute"):
        layer(torch.randn(4, 3))
