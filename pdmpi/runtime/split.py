"""The backward in two parts: gradients of a stage's inputs first, of its parameters later.

Zero-bubble pipeline parallelism (Qi et al., 2023) sends the input gradients on at once and
fills bubbles with the parameters' gradients.  Both parts walk the same autograd graph.  The
first part runs only paths to the inputs, so joints (`pdmpi.model.joints`) compute no parameter
gradient, and keeps what arrived at each joint; the second part restarts at each joint towards
its parameters alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from pdmpi.model.joints import Arrivals, Joints

__all__ = ["SplitBackward"]


class SplitBackward:
    """One microbatch's backward through one stage.

    Parameters
    ----------
    roots, gradients
        As for ``torch.autograd.backward``.
    leaves
        The stage's inputs that need a gradient.

    Notes
    -----
    Where one parameter is used at two joints (a recurrent use of one layer), the parts
    cannot be told apart by the engine; then `input_part` does the whole backward.
    """

    def __init__(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None], leaves: Sequence[Tensor]
    ) -> None:
        self._roots = roots
        self._gradients = gradients
        self._leaves = leaves
        self._joints = Joints(roots, leaves)
        beside = [*self._joints.parameters.values(), self._joints.aside]
        uses = Counter(id(target) for targets in beside for target in targets)
        self.is_whole = any(count > 1 for count in uses.values())
        """Whether the first part is the whole backward."""
        self._arrived: dict[Node, Arrivals] = {}

    def input_part(self) -> None:
        """Accumulate the gradients of the leaves."""
        if self.is_whole:
            torch.autograd.backward(self._roots, self._gradients)
            return
        if not self._leaves or not self._joints.reaching:
            return
        with self._joints.watched(self._arrived.__setitem__):
            torch.autograd.backward(
                *self._chosen(leading_to_leaf=True), inputs=list(self._leaves), retain_graph=True
            )
        self._roots, self._gradients = self._chosen(leading_to_leaf=False)

    def weight_part(self) -> None:
        """Accumulate the gradients of the parameters; the graph is freed after it."""
        if self.is_whole:
            return
        if self._roots:
            torch.autograd.backward(self._roots, self._gradients)
        for node, targets in self._joints.parameters.items():
            arrived = [(i, g) for i, g in enumerate(self._arrived.pop(node, ())) if g is not None]
            if arrived:
                edges = [GradientEdge(node, i) for i, _ in arrived]
                torch.autograd.backward(edges, [g for _, g in arrived], inputs=list(targets))

    def _chosen(self, leading_to_leaf: bool) -> tuple[list[Tensor], list[Tensor | None]]:
        pairs = [
            (root, gradient)
            for root, gradient in zip(self._roots, self._gradients, strict=True)
            if (root.grad_fn in self._joints.reaching) == leading_to_leaf
        ]
        return [root for root, _ in pairs], [gradient for _, gradient in pairs]
