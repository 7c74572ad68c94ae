"""Nested arguments and results: tuples, lists, dictionaries, slices, named tuples, pytree nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["map_tree", "tensors_of", "tree_leaves"]

_ATOMS = (Tensor, nn.Parameter, int, float, str, bool, type(None), torch.dtype, torch.device)
"""A tuple, since torch 2.6's compiler looks into no frozen set."""


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the structure with ``function`` applied to each leaf."""
    kind = type(tree)
    if kind in _ATOMS or isinstance(tree, Tensor):
        return function(tree)
    if kind is tuple or kind is list or kind is torch.Size:
        items = [map_tree(function, item) for item in tree]
        return items if kind is list else tuple(items)
    if kind is dict:
        return {key: map_tree(function, value) for key, value in tree.items()}
    if kind is slice:
        return slice(*(map_tree(function, part) for part in (tree.start, tree.stop, tree.step)))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return kind(*(map_tree(function, item) for item in tree))
    if kind in pytree.SUPPORTED_NODES:
        leaves, spec = pytree.tree_flatten(tree)
        return pytree.tree_unflatten([function(leaf) for leaf in leaves], spec)
    if isinstance(tree, tuple):  # torch.return_types.*
        return kind([map_tree(function, item) for item in tree])
    return function(tree)


def tree_leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves in the order in which `map_tree` visits them."""
    found: list[Any] = []
    map_tree(found.append, tree)
    return iter(found)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors among the leaves, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
