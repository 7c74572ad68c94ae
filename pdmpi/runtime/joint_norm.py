"""Batch normalisation over what all replicas of a stage run at the same time.

A flushed schedule gives each of R replicas every R-th microbatch; those of one turn (R
consecutive ones) are normalised as one batch, whose statistics also move the running ones. The
program lets replicas wait for each other before each forward and each backward, and each
normalisation then sums over them: forward the count, the sum and the sum of squares of each
channel; backward what the gradient with respect to mean and variance needs (Ioffe and Szegedy,
ICML 2015, section 3).  A recomputation takes the statistics that its forward left.  The sums say
of which layer they are, so that replicas which run different layers do not train on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pdmpi.errors import InputError, PdmpiError
from pdmpi.runtime.slots import Allocate
from pdmpi.runtime.statistics import all_but_channels, exact, move, sums_of
from pdmpi.transport.base import Bound, Transport

__all__ = ["JointNormalisation"]


@dataclass(frozen=True, slots=True)
class _Run:
    microbatch: int
    leaves: bool
    takes: bool


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
        self._left: dict[int, list[Tensor]] = {}
        self._now: _Run | None = None
        self._differs: list[Tensor] = []
        self._num_replicas = len(ranks)
        for number, layer in enumerate((m for m in module.modules() if isinstance(m, _BatchNorm)), start=1):
            memory, buffer = allocate(8 * (3 + 2 * layer.num_features))
            sum_over = self._sum_over(
                number, memory.view(torch.float64), transport.bind_allreduce(buffer, "float64", ranks)
            )
            layer.forward = self._forward_of(layer, sum_over)  # type: ignore[method-assign, assignment]

    @contextmanager
    def running(self, microbatch: int, *, leaves: bool, takes: bool) -> Iterator[None]:
        """Be in a microbatch's forward.

        Parameters
        ----------
        leaves
            Whether statistics are kept for a recomputation.
        takes
            Whether this is one, which takes them and moves no running statistics.
        """
        self._now = _Run(microbatch, leaves, takes)
        try:
            yield
        finally:
            self._now = None

    def check(self) -> None:
        """Raise before an update where replicas summed different layers.

        Raises
        ------
        PdmpiError
            Their forwards depend on the data.
        """
        if self._differs and bool(torch.stack(self._differs).any()):
            raise PdmpiError(
                "replicas of a stage ran different batch normalisations at the same time: the model's "
                'forward depends on its data; set [train] batch_norm = "microbatch"'
            )
        self._differs.clear()

    def _sum_over(self, number: int, flat: Tensor, bound: Bound) -> SumOver:
        label = flat.new_tensor([number, number * number])

        def sum_over(mine: Tensor) -> Tensor:
            flat[:2] = label
            flat[2:] = mine
            bound.post().wait()
            total = flat.clone()
            self._differs.append((total[:2] != self._num_replicas * label).any())
            return total[2:]

        return sum_over

    def _forward_of(self, layer: _BatchNorm, sum_over: SumOver) -> Callable[[Tensor], Tensor]:
        alone = layer.forward

        def forward(values: Tensor) -> Tensor:
            if not layer.training:
                return alone(values)
            if self._now is None:
                raise InputError(
                    "a batch normalisation runs in the backward (torch.utils.checkpoint); with [train] "
                    'batch_norm = "synchronised" leave that to [schedule] recompute'
                )
            layer._check_input_dim(values)  # type: ignore[no-untyped-call]
            sums = self._statistics(layer, values.detach(), sum_over, self._now)
            operands = (values, layer.weight, layer.bias, layer.eps, sums, sum_over)
            made: Tensor = _Normalise.apply(*operands)  # type: ignore[no-untyped-call]
            return made

        return forward

    def _statistics(self, layer: _BatchNorm, values: Tensor, sum_over: SumOver, now: _Run) -> Tensor:
        if now.takes:
            left = self._left[now.microbatch]
            sums = left.pop(0)
            if not left:
                del self._left[now.microbatch]
            return sums
        sums = sum_over(sums_of(values))
        if layer.track_running_stats and layer.running_mean is not None:
            move(layer, sums)
        if now.leaves:
            self._left.setdefault(now.microbatch, []).append(sums)
        return sums


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
        x = exact(values)
        mean, mean_of_squares = (sums[1:] / sums[0]).view(2, -1)
        invstd = ((mean_of_squares - mean * mean).clamp_(min=0) + eps).rsqrt()
        ctx.save_for_backward(values, weight, bias, mean, invstd)
        ctx.number, ctx.sum_over = sums[0], sum_over
        made = (x - _spread(mean, x)) * _spread(invstd, x)
        if weight is not None:
            made = made * _spread(weight, x)
        if bias is not None:
            made = made + _spread(bias, x)
        return made.to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, bias, mean, invstd = ctx.saved_tensors
        over = all_but_channels(values)
        x, arriving = exact(values), exact(gradient)
        normal = (x - _spread(mean, x)) * _spread(invstd, x)
        of_bias = arriving.sum(over, dtype=torch.float64)
        of_weight = (arriving * normal).sum(over, dtype=torch.float64)
        sums = ctx.sum_over(torch.cat([of_bias.new_zeros(1), of_bias, of_weight]))
        level, slope = (sums[1:] / ctx.number).view(2, -1)
        scale = invstd if weight is None else invstd * weight
        of_values = _spread(scale, x) * (arriving - _spread(level, x) - normal * _spread(slope, x))
        return (
            of_values.to(values.dtype),
            None if weight is None else of_weight.to(weight.dtype),
            None if bias is None else of_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _spread(per_channel: Tensor, like: Tensor) -> Tensor:
    """Return one number a channel in the shape that multiplies a layer's values."""
    return per_channel.to(like.dtype).view(1, -1, *[1] * (like.dim() - 2))
