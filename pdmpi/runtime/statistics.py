"""Running statistics of a replicated stage.

Policy: while a program runs each replica keeps the statistics of its own microbatches, once
each.  Whenever the pipeline is drained they are averaged over the replicas, so that
evaluation, checkpoints and the next program see one set.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from pdmpi.transport.base import Transport

__all__ = ["average_statistics", "running_statistics"]


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
