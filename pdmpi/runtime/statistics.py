"""Running statistics of batch normalisation, over microbatches and over the replicas of a stage.

Every microbatch is normalised by its own statistics: those of the later ones of a minibatch
are not known when it goes forward.  What running statistics average, for evaluation, is one
of two things.

By microbatch: each updates them once.  Replicas keep the statistics of their own microbatches
while a program runs; whenever the pipeline is drained these are averaged, so that evaluation,
checkpoints and the next program see one set.

By minibatch (`MinibatchStatistics`): each update moves them once, by the mean and variance
over all its microbatches on all replicas, as in one process that normalises the whole minibatch
(Huang et al., GPipe, NeurIPS 2019, section 2.2: "we track the moving average of the sufficient
statistics over the entire mini-batch to be used during evaluation").

What replicas run at the same time can be normalised together: `pdmpi.runtime.joint_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from pdmpi.runtime.slots import Allocate
from pdmpi.transport.base import Transport

__all__ = [
    "MinibatchStatistics", "all_but_channels", "average_statistics", "exact", "move", "running_statistics",
    "sums_of",
]  # fmt: skip


class MinibatchStatistics:
    """Sums over the microbatches of an update, for the running statistics of one stage.

    Parameters
    ----------
    module
        The stage; its layers stop to track statistics themselves.
    transport, ranks
        What sums over the stage's replicas.
    allocate
        Makes memory that it sums.

    Attributes
    ----------
    counts
        Whether what runs now is counted: not a recomputation.
    """

    def __init__(
        self, module: nn.Module, transport: Transport, ranks: Sequence[int], allocate: Allocate
    ) -> None:
        self.counts = True
        self._layers = [
            part
            for part in module.modules()
            if isinstance(part, _BatchNorm) and part.track_running_stats and part.running_mean is not None
        ]
        widths = [1 + 2 * layer.num_features for layer in self._layers]
        memory, buffer = allocate(8 * sum(widths))
        self._flat = memory.view(torch.float64)
        self._sum = transport.bind_allreduce(buffer, "float64", ranks) if len(ranks) > 1 and widths else None
        self._sums = torch.split(self._flat, widths)
        for layer, sums in zip(self._layers, self._sums, strict=True):
            layer.track_running_stats = False
            layer.register_forward_pre_hook(self._counter(sums))

    def reduce(self) -> None:
        """Sum over the replicas, each of which calls it once an update, after its last microbatch."""
        if self._sum is not None:
            self._sum.post().wait()

    def commit(self) -> None:
        """Move the running statistics by those of the update's microbatches, and start anew."""
        for layer, sums in zip(self._layers, self._sums, strict=True):
            move(layer, sums)
        self._flat.zero_()

    def _counter(self, sums: Tensor) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        """Return what adds `sums_of` a layer's input."""

        def count(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            if not (layer.training and self.counts):
                return
            sums.add_(sums_of(inputs[0].detach()))

        return count


def sums_of(values: Tensor) -> Tensor:
    """Return count, sum and sum of squares of a layer's input, by channel, in float64: shape (1 + 2 C)."""
    number = values.numel() // values.shape[1]
    variance, mean = torch.var_mean(exact(values), all_but_channels(values), correction=0)
    mean, variance = mean.double(), variance.double()
    return torch.cat([mean.new_full((1,), number), number * mean, number * (variance + mean * mean)])


def exact(values: Tensor) -> Tensor:
    """Return values in the type that they are normalised in: float32 for those of sixteen bits."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def all_but_channels(values: Tensor) -> list[int]:
    """Return the dimensions that a layer normalises over."""
    return [i for i in range(values.dim()) if i != 1]


@torch.no_grad()
def move(layer: _BatchNorm, sums: Tensor) -> None:
    """Move a layer's running statistics once, by `sums_of` all that was normalised."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    number, total, squares = sums[0], *sums[1:].view(2, -1)
    mean = total / number
    variance = (squares / number - mean * mean) * (number / (number - 1))
    layer.num_batches_tracked.add_(1)
    share: Any = layer.momentum
    if share is None:
        share = layer.num_batches_tracked.double().reciprocal()
    for held, new in ((layer.running_mean, mean), (layer.running_var, variance)):
        moved = held + share * (new.to(held.dtype) - held)
        held.copy_(torch.where(number > 0, moved, held))


def running_statistics(module: nn.Module) -> list[Tensor]:
    """Return the running means and variances of a stage, in the order of its modules."""
    return [
        tensor
        for part in module.modules()
        if isinstance(part, _NormBase)
        for tensor in (part.running_mean, part.running_var)
        if tensor is not None
    ]


def average_statistics(module: nn.Module, transport: Transport, ranks: Sequence[int]) -> None:
    """Replace running statistics by their mean over the replicas, bitwise the same on each."""
    found = running_statistics(module)
    if len(ranks) == 1 or not found:
        return
    flat = torch.cat([tensor.detach().reshape(-1).to("cpu", torch.float64) for tensor in found])
    transport.post_allreduce(flat.numpy().view("uint8"), "float64", ranks).wait()
    flat /= len(ranks)
    with torch.no_grad():
        for tensor, mean in zip(found, torch.split(flat, [t.numel() for t in found]), strict=True):
            tensor.copy_(mean.view(tensor.shape))
