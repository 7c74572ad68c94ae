"""What a forward leaves for its backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pdmpi.graph import Ref
from pdmpi.runtime.split import SplitBackward

__all__ = ["StageRun"]


@dataclass
class StageRun:
    """One microbatch between its forward and its backward.

    Attributes
    ----------
    leaves
        The values that were received, as autograd's leaves.
    outputs
        The values that the stage made; none where it computed the loss, from which its backward starts.
    loss
        At the last stage.
    split
        A backward that is half done.
    """

    leaves: Mapping[Ref, Tensor]
    outputs: Mapping[Ref, Tensor]
    loss: Tensor | None
    split: SplitBackward | None = None
