"""Gradients that wait in one place add up as autograd's own, whoever computes them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pdmpi.runtime import waiting
from pdmpi.runtime.waiting import WaitingGradients


class Net(nn.Module):
    """A layer that is used twice, one that is not always used, one that never is, and one with few values."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.sometimes, self.never = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        x = self.norm(self.twice(torch.tanh(self.twice(x))))
        return self.sometimes(x) if whole else x


def network() -> Net:
    torch.manual_seed(0)
    return Net().double()


@pytest.mark.parametrize("small_bytes", [0, 400, 1 << 20])
@given(st.lists(st.sampled_from(["launched", "partly launched", "replayed"]), min_size=1, max_size=6))
def test_sums_are_those_of_autograd(small_bytes: int, ways: list[str]) -> None:
    net, reference = network(), network()
    parameters = list(net.parameters())
    trained = {p for name, p in net.named_parameters() if not name.startswith("never")}
    held = WaitingGradients(parameters)
    batches = torch.randn(len(ways), 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "_SMALL_BYTES", small_bytes)
        for i, (way, batch) in enumerate(zip(ways, batches, strict=True)):
            reference(batch, way != "partly launched").square().sum().backward()
            loss = net(batch, way != "partly launched").square().sum()
            if way == "replayed":
                held.expect(trained, opens=i == 0, at_once=True)
                loss.backward()
                assert held.add()
            else:
                with held.collected(opens=i == 0):
                    loss.backward()
    for (name, parameter), other in zip(net.named_parameters(), reference.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None:
            assert parameter.grad is held._places[parameter], name
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_sparse_gradients_stay_where_they_are() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    held = WaitingGradients(list(table.parameters()))
    with held.collected(opens=True):
        table(torch.tensor([1, 3])).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.layout == torch.sparse_coo
