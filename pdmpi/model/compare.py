"""Recordings of one model laid over each other: other batch sizes, and evaluation.

Python integers that follow the number of rows of the batch are found by recording the
model with two batch sizes; what evaluation does otherwise than training, by recording it
in both modes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from pdmpi.model.recording import Attribute, BatchSize, CannotFollow, Constant, Recording, Value
from pdmpi.model.tree import map_tree, tree_leaves

__all__ = ["Differs", "with_batch_size", "with_evaluation"]


class Differs(Exception):
    """Two recordings cannot be laid over each other; ``str`` says why."""


def with_batch_size(first: Recording, second: Recording, rows: tuple[int, int]) -> Recording:
    """Return the first recording with `BatchSize` for integers that follow the rows.

    Parameters
    ----------
    first, second
        Recorded with ``rows[0]`` and ``rows[1]`` rows.

    Raises
    ------
    Differs
        When the model does something else for another batch size.
    """
    if len(first.nodes) != len(second.nodes):
        raise Differs("it makes other calls for another batch size")
    nodes = []
    for a, b in zip(first.nodes, second.nodes, strict=True):
        if a.target != b.target or a.makes != b.makes:
            raise Differs("it makes other calls for another batch size")
        args, kwargs = _merged((a.args, a.kwargs), (b.args, b.kwargs), rows)
        nodes.append(replace(a, args=args, kwargs=kwargs))
    output = _merged(first.output, second.output, rows)
    return replace(
        first, nodes=nodes, output=output, rows=rows[0], batch_dims=_batch_dims(first, second, rows)
    )


def _batch_dims(first: Recording, second: Recording, rows: tuple[int, int]) -> dict[Value, int]:
    found: dict[Value, int] = {}
    for number, (a, b) in enumerate(zip(first.facts, second.facts, strict=True)):
        for dim, sizes in enumerate(zip(a.shape, b.shape, strict=False)):
            if sizes == rows:
                found.setdefault(Value(number), dim)
    return found


def _merged(a: Any, b: Any, rows: tuple[int, int]) -> Any:
    others = iter(list(tree_leaves(b)))
    if len(list(tree_leaves(a))) != len(list(tree_leaves(b))):
        raise Differs("it passes other arguments for another batch size")

    def merge(x: Any) -> Any:
        y = next(others)
        if type(x) is not int or type(y) is not int or x == y:
            if isinstance(x, (bool, float, str, Value, Attribute)) and x != y:
                raise Differs(f"it computes {x!r} from the batch size")
            return x
        scale = (y - x) // (rows[1] - rows[0])
        offset = x - scale * rows[0]
        if scale * rows[1] + offset != y or (offset and x % rows[0] == 0 and y % rows[1] == 0):
            raise Differs(f"it computes {x} from the batch size in a way that is not linear")
        return BatchSize(scale, offset)

    return map_tree(merge, a)


def with_evaluation(
    training: Recording, evaluation: Recording, available: Callable[[int, Value], bool], returned: set[Value]
) -> Recording:
    """Return the recording of training with the arguments that its calls have in evaluation.

    Parameters
    ----------
    training, evaluation
        The model recorded in both modes.
    available
        Whether the node at a position could read a value without another boundary.
    returned
        Values that reach the caller in training.

    Raises
    ------
    CannotFollow
        With the module whose forward differs too much between the modes.
    """
    same: dict[Value, Value] = {leaf: leaf for leaf in _values([tree for _, tree in training.inputs])}
    positions = _positions(training)
    count: dict[tuple[Any, str], int] = {}
    nodes = list(training.nodes)
    for node in evaluation.nodes:
        key = (node.target, node.owner)
        count[key] = count.get(key, 0) + 1
        place = positions.get((node.target, node.owner, count[key]))
        if place is None:
            raise CannotFollow(node.owner, _DIFFERENT)
        twin = nodes[place]
        args, kwargs = map_tree(partial(_translated, same=same, owner=node.owner), (node.args, node.kwargs))
        if len(node.results) != len(twin.results) or len(node.mutated) != len(twin.mutated):
            raise CannotFollow(node.owner, _DIFFERENT)
        same.update(zip(node.makes, twin.makes, strict=True))
        if not _equal((args, kwargs), (twin.args, twin.kwargs)):
            if not all(available(place, value) for value in _values((args, kwargs))):
                raise CannotFollow(node.owner, _DIFFERENT)
            nodes[place] = replace(twin, evaluation=(args, kwargs))
    output = map_tree(lambda leaf: same.get(leaf) if isinstance(leaf, Value) else leaf, evaluation.output)
    missing = [v for v in _values(evaluation.output) if same.get(v) not in returned]
    if missing:
        raise CannotFollow("", _DIFFERENT)
    return replace(training, nodes=nodes, evaluation_output=output)


_DIFFERENT = "its forward does other things in evaluation than in training"


def _positions(recording: Recording) -> dict[tuple[Any, str, int], int]:
    count: dict[tuple[Any, str], int] = {}
    found = {}
    for place, node in enumerate(recording.nodes):
        key = (node.target, node.owner)
        count[key] = count.get(key, 0) + 1
        found[node.target, node.owner, count[key]] = place
    return found


def _translated(leaf: Any, same: dict[Value, Value], owner: str) -> Any:
    if not isinstance(leaf, Value):
        return leaf
    if leaf not in same:
        raise CannotFollow(owner, _DIFFERENT)
    return same[leaf]


def _values(tree: Any) -> list[Value]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Value)]


def _equal(a: Any, b: Any) -> bool:
    first, second = list(tree_leaves(a)), list(tree_leaves(b))
    return len(first) == len(second) and all(_same_leaf(x, y) for x, y in zip(first, second, strict=True))


def _same_leaf(x: Any, y: Any) -> bool:
    if isinstance(x, Constant) and isinstance(y, Constant):
        return x.tensor is y.tensor
    return type(x) is type(y) and bool(x is y or x == y)
