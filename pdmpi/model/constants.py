"""Values that a model computes from constants alone, evaluated when Python asks for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pdmpi.model.deferred import Tape
from pdmpi.model.recording import Attribute, Constant, Recording, Value
from pdmpi.model.tree import map_tree, tensors_of, tree_leaves

__all__ = ["Constants"]


class Constants:
    """Real contents of masks, positions and the like, while a model is recorded.

    Parameters
    ----------
    recording
        What has been recorded up to now.
    root
        The model; its buffers count as constants, its parameters do not.
    tape
        Makes its tensors real.
    """

    def __init__(self, recording: Recording, root: nn.Module, tape: Tape) -> None:
        self._recording = recording
        self._root = root
        self._tape = tape
        self._known: dict[Value, Tensor | None] = {}

    @torch.no_grad()
    def real(self, tree: Any) -> Any | None:
        """Return the structure with real tensors, or None when one of them is no constant."""
        found = [
            self._of(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, (Value, Attribute, Constant))
        ]
        if any(tensor is None for tensor in found):
            return None
        tensors = iter(found)
        return map_tree(
            lambda leaf: next(tensors) if isinstance(leaf, (Value, Attribute, Constant)) else _on_cpu(leaf),
            tree,
        )

    def _of(self, leaf: Value | Attribute | Constant) -> Tensor | None:
        if isinstance(leaf, Constant):
            return self._tape.realise(leaf.tensor)
        if isinstance(leaf, Attribute):
            parent, _, name = leaf.path.rpartition(".")
            tensor = getattr(self._root.get_submodule(parent), name)
            return None if isinstance(tensor, nn.Parameter) else self._tape.realise(tensor)
        if leaf not in self._known:
            self._known[leaf] = None
            self._evaluate(leaf)
        return self._known[leaf]

    def _evaluate(self, value: Value) -> None:
        node = next((n for n in self._recording.nodes if value in n.makes), None)
        if node is None or isinstance(node.target, str) or node.random:
            return
        arguments = self.real((node.args, node.kwargs))
        if arguments is not None:
            out = tensors_of(node.target(*arguments[0], **arguments[1]))
            self._known.update(zip(node.results, out, strict=True))
            for before, after in node.mutated:
                self._known[after] = self._known[before]


def _on_cpu(leaf: Any) -> Any:
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
