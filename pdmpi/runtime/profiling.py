"""Profiles with the updates that training makes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from pdmpi.config.run import RunConfig
from pdmpi.model.example import dtype_of
from pdmpi.model.measure import UpdateCosts, profile_model
from pdmpi.model.optimizer import make_optimizer
from pdmpi.model.precision import is_sixteen_bits
from pdmpi.model.timing import Clock
from pdmpi.runtime.graphs import can_capture
from pdmpi.runtime.limit import limit_of, looks_into_updates, squared_norm
from pdmpi.runtime.rates import changes_rates
from pdmpi.runtime.weights import WeightRing

__all__ = ["profile_run", "update_costs"]

_TENSOR_BYTES = 1 << 22
_LARGE_TENSORS = 64
"""Tensors of that size at most; on a GPU always, where launches would otherwise be all that takes time."""
_REPEATS = 5


def update_costs(config: RunConfig, clock: Clock, device: torch.device, parameter_bytes: int) -> UpdateCosts:
    """Measure updates like those of a run: clipped or not, in CUDA graphs where the run's would be.

    Off a GPU as many parameters are stepped as the whole model has, up to `_LARGE_TENSORS`, since what
    outgrows the caches takes several times as long; and the layers' own backwards add to gradients, so
    that takes no time more.
    """
    dtype = dtype_of(config)
    count = max(1, min(parameter_bytes // _TENSOR_BYTES, _LARGE_TENSORS))
    tensors, width = (_LARGE_TENSORS, 4096) if clock.on_cuda else (count, 512)
    rows = _TENSOR_BYTES // (width * torch.empty(0, dtype=dtype).element_size())
    weights = [torch.randn(rows, width, device=device).to(dtype) for _ in range(tensors)]
    gradients = [torch.randn_like(weight) for weight in weights]
    sums = [torch.zeros_like(weight) for weight in weights if clock.on_cuda]
    limit = limit_of(config)
    ring = WeightRing(
        {str(i): nn.Parameter(weight) for i, weight in enumerate(weights)},
        num_slots=1,
        make_optimizer=lambda masters: make_optimizer(config.optimizer, masters.values(), device),
        fuses=not looks_into_updates(config),
    )
    scale = 1.0 / config.schedule.microbatches

    def update() -> None:
        for parameter, gradient in zip(ring.parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        if limit is None:
            ring.update(0, 0, scale)
        else:
            verdict = limit.judge(squared_norm(ring.gather(scale), device))
            ring.step(0, 0, factor=verdict.factor, applies=verdict.applies)

    def add() -> None:
        for total, gradient in zip(sums, gradients, strict=True):
            total.add_(gradient)

    graphs = bool(config.runtime.cuda_graphs)
    captured = graphs and limit is None and not changes_rates(config) and can_capture(ring.optimizer)
    update_s = _seconds(update, clock, captured)
    assert ring.optimizer is not None
    state = [t for held in ring.optimizer.state.values() for t in held.values() if isinstance(t, Tensor)]
    state += ring.masters.values() if is_sixteen_bits(dtype) else []
    nbytes = sum(weight.nbytes for weight in weights)
    return UpdateCosts(
        state_factor=sum(t.nbytes for t in state) / nbytes,
        update_s=update_s / nbytes,
        accumulate_s=_seconds(add, clock, graphs) / nbytes if clock.on_cuda else 0.0,
    )


def _seconds(work: Callable[[], None], clock: Clock, graphs: bool) -> float:
    """Return the median seconds of some work after one run, in a CUDA graph if that is wanted and can be."""
    work()
    chosen = (clock.captured(work) if graphs else None) or work
    seconds = []
    for _ in range(_REPEATS):
        start = clock.mark()
        chosen()
        end = clock.mark()
        clock.finish()
        seconds.append(clock.between(start, end))
    return statistics.median(seconds)


profile_run = partial(profile_model, update_costs=update_costs)
"""`profile_model` with the runtime's updates."""
