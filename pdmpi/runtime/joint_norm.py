"""Batch normalisation over what all replicas of a stage run at the same time.

A flushed schedule gives each of R replicas every R-th microbatch; those of one turn (R
consecutive ones) are normalised as one batch, whose statistics also move the running ones. The
program lets replicas wait for each other before each forward and each backward, and each
normalisation then sums over them: forward the count, the sum and the sum of squares of each
channel; backward what the gradient with respect to mean and variance needs (Ioffe and Szegedy,
ICML 2015, section 3).  A recomputation takes the statistics that its forward left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pdmpi.runtime.slots import Allocate
from pdmpi.runtime.statistics import move, sums_of
from pdmpi.transport.base import Request, Transport

__all__ = ["JointNormalisation"]

SumOver = Callable[[Tensor], Tensor]
"""Returns the sum of a flat float64 tensor over the replicas."""


class JointNormalisation:
    """Lets the batch normalisations of one stage sum over its replicas.

    Parameters
    ----------
    module
        The stage; the forwards of its layers are replaced.
    transport, ranks
        What sums over the stage's replicas.
    allocate
        Makes memory that it sums.
    """

    def __init__(
        self, module: nn.Module, transport: Transport, ranks: Sequence[int], allocate: Allocate
    ) -> None:
        self._left: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._microbatch = 0
        self._leaves = self._takes = False
        for layer in (part for part in module.modules() if isinstance(part, _BatchNorm)):
            memory, buffer = allocate(8 * (1 + 2 * layer.num_features))
            bound = transport.bind_allreduce(buffer, "float64", ranks)
            sum_over = _sum_over(memory.view(torch.float64), lambda bound=bound: bound.post())  # type: ignore[misc]
            layer.forward = self._forward_of(layer, sum_over)  # type: ignore[method-assign, assignment]

    def begin(self, microbatch: int, *, leaves: bool, takes: bool) -> None:
        """Prepare for a microbatch's forward.

        Parameters
        ----------
        leaves
            Whether statistics are kept for a recomputation.
        takes
            Whether this is one, which takes them and moves no running statistics.
        """
        self._microbatch, self._leaves, self._takes = microbatch, leaves, takes

    def _forward_of(self, layer: _BatchNorm, sum_over: SumOver) -> Callable[[Tensor], Tensor]:
        alone = layer.forward

        def forward(values: Tensor) -> Tensor:
            if not layer.training:
                return alone(values)
            layer._check_input_dim(values)  # type: ignore[no-untyped-call]
            if self._takes:
                sums = self._left[self._microbatch].pop(0)
            else:
                sums = sum_over(sums_of(values.detach()))
                if layer.track_running_stats and layer.running_mean is not None:
                    move(layer, sums)
            if self._leaves:
                self._left[self._microbatch].append(sums)
            operands = (values, layer.weight, layer.bias, layer.eps, sums, sum_over)
            made: Tensor = _Normalise.apply(*operands)  # type: ignore[no-untyped-call]
            return made

        return forward


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        sums: Tensor,
        sum_over: SumOver,
    ) -> Tensor:
        exact = _exact(values)
        mean, mean_of_squares = (sums[1:] / sums[0]).view(2, -1)
        invstd = ((mean_of_squares - mean * mean).clamp_(min=0) + eps).rsqrt()
        ctx.save_for_backward(values, weight, bias, mean, invstd)
        ctx.number, ctx.sum_over = sums[0], sum_over
        made = (exact - _spread(mean, exact)) * _spread(invstd, exact)
        if weight is not None:
            made = made * _spread(weight, exact)
        if bias is not None:
            made = made + _spread(bias, exact)
        return made.to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, bias, mean, invstd = ctx.saved_tensors
        over = [i for i in range(values.dim()) if i != 1]
        exact, arriving = _exact(values), _exact(gradient)
        normal = (exact - _spread(mean, exact)) * _spread(invstd, exact)
        of_bias = arriving.sum(over, dtype=torch.float64)
        of_weight = (arriving * normal).sum(over, dtype=torch.float64)
        sums = ctx.sum_over(torch.cat([of_bias.new_zeros(1), of_bias, of_weight]))
        level, slope = (sums[1:] / ctx.number).view(2, -1)
        scale = invstd if weight is None else invstd * weight
        of_values = _spread(scale, exact) * (
            arriving - _spread(level, exact) - normal * _spread(slope, exact)
        )
        return (
            of_values.to(values.dtype),
            None if weight is None else of_weight.to(weight.dtype),
            None if bias is None else of_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _sum_over(flat: Tensor, post: Callable[[], Request]) -> SumOver:
    def sum_over(mine: Tensor) -> Tensor:
        flat.copy_(mine)
        post().wait()
        return flat.clone()

    return sum_over


def _exact(values: Tensor) -> Tensor:
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _spread(per_channel: Tensor, like: Tensor) -> Tensor:
    """Return one number a channel in the shape that multiplies a layer's values."""
    return per_channel.to(like.dtype).view(1, -1, *[1] * (like.dim() - 2))
