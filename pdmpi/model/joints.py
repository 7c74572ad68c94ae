"""Where an autograd graph parts into gradients of inputs and gradients of parameters.

A node where a path to an input and a path to parameters part ways is a *joint*: a convolution, a
matrix product, a norm.  What arrives at the joints is all that the parameters' gradients need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import Node

__all__ = ["Arrivals", "Joints"]

Arrivals = tuple[Tensor | None, ...]
"""The gradients of a node's outputs."""


class Joints:
    """The joints of what some values were computed by.

    Parameters
    ----------
    roots
        The values.
    leaves
        The inputs that need a gradient.
    """

    def __init__(self, roots: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        ends = [root.grad_fn for root in roots if root.grad_fn is not None]
        nodes = _topological(ends)
        self.reaching = _reaching(nodes, {id(leaf) for leaf in leaves})
        """Nodes from which an input is reached."""
        self.parameters = {
            node: beside
            for node in nodes
            if node in self.reaching and (beside := _parameters_beside(node, self.reaching))
        }
        """For each joint the parameters that it leads to beside all paths to inputs."""
        self.aside = _variables([node for node in ends if node not in self.reaching])
        """Parameters behind values that no input leads to."""

    @contextmanager
    def watched(self, see: Callable[[Node, Arrivals], None]) -> Iterator[None]:
        """Let ``see`` be called with each joint and what arrives there, while a backward runs."""

        def seeing(node: Node) -> Callable[[Arrivals], None]:
            return lambda gradients: see(node, gradients)

        handles = [node.register_prehook(seeing(node)) for node in self.parameters]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


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


def _parameters_beside(node: Node, reaching: set[Node]) -> list[Tensor]:
    """Return the parameters that a node leads to without passing any path to an input."""
    return _variables([n for n, _ in node.next_functions if n is not None and n not in reaching])


def _variables(nodes: Sequence[Node]) -> list[Tensor]:
    """Return the leaf tensors that some nodes lead to."""
    return [v for n in _topological(nodes) if (v := _variable(n)) is not None]
