"""The backward in two parts: gradients of a stage's inputs first, of its parameters later.

Zero-bubble pipeline parallelism (Qi et al., 2023) sends the input gradients on at once and
fills bubbles with the parameters' gradients.  Both parts walk the same autograd graph.  A
node where a path to a stage input and a path to parameters part ways is a *joint* (a
convolution, a matrix product, a norm).  The first part runs only paths to the inputs, so
joints compute no parameter gradient, and keeps what arrived at each joint; the second part
restarts at each joint towards its parameters alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

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
        nodes = _topological([r.grad_fn for r in roots if r.grad_fn is not None])
        self._reaches_leaf = _reaching(nodes, {id(leaf) for leaf in leaves})
        self._joints = {
            node: targets
            for node in nodes
            if node in self._reaches_leaf and (targets := _parameters_beside(node, self._reaches_leaf))
        }
        aside = [r.grad_fn for r in roots if r.grad_fn is not None and r.grad_fn not in self._reaches_leaf]
        beside = [*self._joints.values(), _variables(aside)]
        uses = Counter(id(target) for targets in beside for target in targets)
        self._whole = any(count > 1 for count in uses.values())
        self._arrived: dict[Node, tuple[Tensor | None, ...]] = {}

    def input_part(self) -> None:
        """Accumulate the gradients of the leaves."""
        if self._whole:
            torch.autograd.backward(self._roots, self._gradients)
            return
        if not self._leaves or not self._reaches_leaf:
            return
        handles = [node.register_prehook(self._keeper(node)) for node in self._joints]
        try:
            torch.autograd.backward(
                *self._chosen(leading_to_leaf=True), inputs=list(self._leaves), retain_graph=True
            )
        finally:
            for handle in handles:
                handle.remove()

    def weight_part(self) -> None:
        """Accumulate the gradients of the parameters; the graph is freed after it."""
        if self._whole:
            return
        roots, gradients = self._chosen(leading_to_leaf=False)
        if roots:
            torch.autograd.backward(roots, gradients)
        for node, targets in self._joints.items():
            arrived = [(i, g) for i, g in enumerate(self._arrived.pop(node, ())) if g is not None]
            if arrived:
                edges = [GradientEdge(node, i) for i, _ in arrived]
                torch.autograd.backward(edges, [g for _, g in arrived], inputs=list(targets))

    def _chosen(self, leading_to_leaf: bool) -> tuple[list[Tensor], list[Tensor | None]]:
        pairs = [
            (root, gradient)
            for root, gradient in zip(self._roots, self._gradients, strict=True)
            if (root.grad_fn in self._reaches_leaf) == leading_to_leaf
        ]
        return [root for root, _ in pairs], [gradient for _, gradient in pairs]

    def _keeper(self, node: Node) -> Any:
        def keep(arrived: tuple[Tensor | None, ...]) -> None:
            self._arrived[node] = arrived

        return keep


def _topological(roots: Sequence[Node]) -> list[Node]:
    """Return every node that the roots reach, each before the nodes it feeds."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((n, False) for n, _ in node.next_functions if n is not None and n not in seen)
    return order[::-1]


def _variable(node: Node) -> Tensor | None:
    """Return the leaf tensor that a node accumulates into, if it is such a node."""
    return getattr(node, "variable", None)


def _reaching(nodes: Sequence[Node], leaves: set[int]) -> set[Node]:
    """Return the nodes from which one of the leaves is reached."""
    found: set[Node] = set()
    for node in reversed(nodes):
        if id(_variable(node)) in leaves or any(n in found for n, _ in node.next_functions):
            found.add(node)
    return found


def _parameters_beside(node: Node, reaches_leaf: set[Node]) -> list[Tensor]:
    """Return the parameters that a node leads to without passing any path to a stage input."""
    return _variables([n for n, _ in node.next_functions if n is not None and n not in reaches_leaf])


def _variables(nodes: Sequence[Node]) -> list[Tensor]:
    """Return the leaf tensors that some nodes lead to."""
    return [v for n in _topological(nodes) if (v := _variable(n)) is not None]
