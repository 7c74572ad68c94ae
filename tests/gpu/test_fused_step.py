"""One pass over an update in 16 bits on a real device: what the optimizer of torch does, rounded the same."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("cupy", reason="CuPy is not installed")

from torch import nn  # noqa: E402

from pdmpi.config.run import OptimizerConfig  # noqa: E402
from pdmpi.model.optimizer import make_optimizer  # noqa: E402
from pdmpi.model.timing import Clock  # noqa: E402
from pdmpi.runtime import weights  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

SHAPES = [(1000, 77), (3,), (1,), (64, 64), (5000,), (4096,), (0,), (2, 3, 5, 7), *[(10, 10)] * 70]
UNUSED = 3

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.01}),
    ("AdamW", {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}),
]


def ring_of(name: str, args: dict[str, Any]) -> weights.WeightRing:
    generator = torch.Generator("cuda").manual_seed(1)
    made = {
        str(i): nn.Parameter(torch.randn(s, device="cuda", generator=generator).bfloat16())
        for i, s in enumerate(SHAPES)
    }
    config = OptimizerConfig.model_validate({"name": name, "args": args})

    def optimizer(masters: Any) -> torch.optim.Optimizer:
        held = list(masters.values())
        groups = [{"params": held[::2]}, {"params": held[1::2], "lr": 0.5 * args["lr"]}]
        return make_optimizer(config, groups, "cuda")

    return weights.WeightRing(made, 2, optimizer)


def steps(ring: weights.WeightRing) -> None:
    generator = torch.Generator("cuda").manual_seed(2)
    for number in range(6):
        for i, parameter in enumerate(ring.parameters.values()):
            flat = torch.randn(parameter.numel() + 1, device="cuda", generator=generator)
            flat = (flat + flat.sign()).bfloat16()  # far from zero, where Adam's steps depend on the last bit
            offset = i % 2  # as in a bucket: not aligned
            parameter.grad = (
                None if i == UNUSED else flat[offset : offset + parameter.numel()].view(parameter.shape)
            )
        ring.update(number % 2, (number + 1) % 2, 0.25)
        assert all(p.grad is None for p in ring.parameters.values())


@pytest.mark.parametrize(("name", "args"), OPTIMIZERS)
def test_it_does_what_the_optimizer_does(
    name: str, args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = ring_of(name, args)
    assert fused._fused is not None
    monkeypatch.setattr(weights, "fused_step", lambda *_: None)
    plain = ring_of(name, args)
    assert plain._fused is None
    steps(fused)
    steps(plain)
    for (path, ours), theirs in zip(fused.masters.items(), plain.masters.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6, msg=path)
        version = fused.version(fused.newest)[int(path)]
        assert torch.equal(version, ours.detach().bfloat16())
        assert fused.optimizer is not None
        assert plain.optimizer is not None
        state, expected = fused.optimizer.state[ours], plain.optimizer.state[theirs]
        for key, value in expected.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(state[key], value, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e-40, -3.3895313892515355e38])
def test_numbers_at_the_ends_are_rounded_as_torch_rounds_them(value: float) -> None:
    parameter = nn.Parameter(torch.zeros(8, device="cuda", dtype=torch.bfloat16))
    ring = weights.WeightRing({"w": parameter}, 1, lambda m: torch.optim.SGD(m.values(), lr=0.0, fused=True))
    with torch.no_grad():
        ring.masters["w"].fill_(value)
    parameter.grad = torch.zeros_like(parameter)
    ring.update(0, 0, 1.0)
    master = ring.masters["w"].detach()
    exact = {"equal_nan": True, "rtol": 0, "atol": 0}
    torch.testing.assert_close(master, torch.full_like(master, value), **exact)
    torch.testing.assert_close(ring.version(0)[0], master.bfloat16(), **exact)


def test_a_captured_update_is_one_more_step_each_time() -> None:
    """Adam's count and the rates that a group has when it is captured are in the graph."""
    name, args = OPTIMIZERS[-1]
    launched, replayed = ring_of(name, args), ring_of(name, args)
    assert replayed._fused is not None
    gradients = [torch.randn_like(p) for p in launched.parameters.values()]

    def update(ring: weights.WeightRing) -> None:
        for parameter, gradient in zip(ring.parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        ring.update(0, 1, 1.0)

    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(5):
            update(launched)
        update(replayed)
        replay = Clock(torch.device("cuda")).captured(lambda: update(replayed))
        assert replay is not None
        for _ in range(4):
            replay()
        torch.cuda.synchronize()
    for ours, theirs in zip(replayed.masters.values(), launched.masters.values(), strict=True):
        assert torch.equal(ours, theirs)
        assert replayed.optimizer is not None
        assert float(replayed.optimizer.state[ours]["step"]) == 5.0


@pytest.mark.parametrize(
    "args", [{"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, {"lr": 0.1, "maximize": True}]
)
def test_what_it_does_not_know_is_left_to_the_optimizer(args: dict[str, Any]) -> None:
    assert ring_of("SGD", args)._fused is None
