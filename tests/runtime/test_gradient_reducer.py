"""A reducer whose backward ended in an error sums the next one's gradients, and only those."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pdmpi.runtime import gradients
from pdmpi.runtime.gradients import GradientReducer
from pdmpi.runtime.slots import host_memory


class Doubled:
    """A sum over two replicas with equal gradients."""

    def __init__(self, buffer: Any, posted: list[int]) -> None:
        self._values, self._posted = buffer.view(np.float64), posted

    def post(self) -> Doubled:
        self._posted.append(len(self._values))
        return self

    def wait(self) -> None:
        self._values *= 2


def test_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 256)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)).double()
    posted: list[int] = []
    transport = SimpleNamespace(
        sums_on_device=False, bind_allreduce=lambda buffer, *_: Doubled(buffer, posted)
    )
    reducer = GradientReducer(dict(net.named_parameters()), transport, [0, 1], host_memory)  # type: ignore[arg-type]
    wrong, right = torch.randn(2, 5, 8, dtype=torch.float64)
    reducer.arm()
    net(wrong).square().sum().backward()
    assert len(posted) > 2, "buckets leave while the backward runs"
    reducer.reset()
    net.zero_grad()
    expected = torch.autograd.grad(net(right).square().sum(), list(net.parameters()))

    posted.clear()
    reducer.arm()
    net(right).square().sum().backward()
    reducer.wait()
    assert len(posted) > 2
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)
