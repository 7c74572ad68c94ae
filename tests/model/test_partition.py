"""Any partition of any model computes what the model in one piece does."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from chain import Chain, cut, total
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_cases import CASES, ROWS

from pdmpi.config.run import ModelConfig
from pdmpi.model.build import build_model
from pdmpi.model.trace import TracedModel, trace_model
from pdmpi.model.tree import tensors_of


@functools.cache
def traced_case(name: str) -> TracedModel:
    config = ModelConfig(factory=f"model_cases:{CASES[name].factory.__name__}")
    return trace_model(config, CASES[name].batch(ROWS), seed=7, dtype=torch.float64)


def close(a: torch.Tensor, b: torch.Tensor, rtol: float = 1e-10) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=rtol, atol=rtol / 100)


def call(module: torch.nn.Module, batch: object) -> object:
    return module(**batch) if isinstance(batch, dict) else module(batch)


def assert_equal(
    chain: Chain, whole: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], rtol: float = 1e-10
) -> None:
    found = chain.gradients()
    assert found.keys() == whole.keys()
    wrong = [name for name in whole if not close(found[name], whole[name], rtol)]
    assert not wrong
    mine = chain.buffers()
    assert mine.keys() == buffers.keys()
    assert not [name for name in buffers if not close(mine[name].double(), buffers[name].double())]
    assert set(chain.names()) == set(chain.traced.module.state_dict())


@pytest.mark.parametrize("name", [name for name in CASES if name != "random_masks"])
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_equals_the_users_own_module(name: str, data: st.DataObject) -> None:
    traced, batch = traced_case(name), CASES[name].batch(ROWS)
    count = len(traced.graph)
    cuts = data.draw(st.lists(st.integers(1, count - 1), max_size=3, unique=True))
    model = build_model(traced)
    output = call(model, batch)
    loss = total(output)
    loss.backward()
    chain = Chain(traced, cut(traced, cuts))
    found, result = chain.step(batch)
    assert close(found, loss)
    assert all(
        close(a.double(), b.double()) for a, b in zip(tensors_of(result), tensors_of(output), strict=True)
    )
    whole = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_equal(chain, whole, dict(model.named_buffers(remove_duplicate=False)))


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(cuts=st.lists(st.integers(1, 12), max_size=3, unique=True), microbatch=st.integers(0, 5))
def test_random_masks_do_not_depend_on_the_partition(cuts: list[int], microbatch: int) -> None:
    traced, batch = traced_case("random_masks"), CASES["random_masks"].batch(ROWS)
    one, many = Chain(traced, cut(traced, [])), Chain(traced, cut(traced, cuts))
    expected, _ = one.step(batch, microbatch)
    torch.manual_seed(99)
    found, _ = many.step(batch, microbatch)
    assert torch.equal(expected, found)
    assert_equal(many, one.gradients(), one.buffers())
    assert not torch.equal(expected, one.step(batch, microbatch + 1)[0])


@pytest.mark.parametrize("name", ["sequential", "in_place", "random_masks", "recurrent"])
def test_recomputation_changes_nothing(name: str) -> None:
    traced, batch = traced_case(name), CASES[name].batch(ROWS)
    cuts = [len(traced.graph) // 2]
    plain, again = Chain(traced, cut(traced, cuts)), Chain(traced, cut(traced, cuts))
    for microbatch in range(3):
        assert torch.equal(plain.step(batch, microbatch)[0], again.step(batch, microbatch, recompute=True)[0])
    assert_equal(again, plain.gradients(), plain.buffers())


OTHER_SIZES = [(name, rows) for name in sorted(CASES) for rows in (ROWS, 7, 2)]
OTHER_SIZES.remove(("shapes", 7))  # its chunks of an odd number of rows differ in size


@pytest.mark.parametrize(("name", "rows"), OTHER_SIZES)
def test_evaluation_and_other_batch_sizes(name: str, rows: int) -> None:
    traced, batch = traced_case(name), CASES[name].batch(rows)
    assert not traced.notes
    model = build_model(traced).eval()
    chain = Chain(traced, cut(traced, [len(traced.graph) // 3, len(traced.graph) // 2]))
    values = traced.flatten(batch)
    with torch.no_grad():
        expected = call(model, batch)
        for stage in chain.stages:
            stage.eval()
            values.update(stage({ref: values[ref] for ref in stage.inputs}, 0))
    found = traced.unflatten(values, training=False)
    assert type(found) is type(expected)
    pairs = zip(tensors_of(found), tensors_of(expected), strict=True)
    assert all(close(a.double(), b.double()) for a, b in pairs)


def test_threads_of_one_process_draw_the_same_masks() -> None:
    traced, batch = traced_case("random_masks"), CASES["random_masks"].batch(ROWS)
    expected = [Chain(traced, cut(traced, [])).step(batch, k)[0] for k in range(20)]
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(lambda: [Chain(traced, cut(traced, [])).step(batch, k)[0] for k in range(20)])
            for _ in range(4)
        ]
        for job in jobs:
            assert all(torch.equal(a, b) for a, b in zip(job.result(), expected, strict=True))
