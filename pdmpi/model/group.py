"""Recorded calls, grouped to layers that a person recognises.

A leaf module's call is a layer by itself.  Functions that one forward calls in a row,
between two submodules, are one layer (``view``, ``transpose``, attention, ``view``), named
after the first of them that computes anything; a row is split where a second parameter
comes in.  When that row is all that a module does, the layer is named after the module.
Functions of constants alone (masks, positions) belong to each layer that reads them and
never cross a boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pdmpi.model.recording import Node, Recording, Value
from pdmpi.model.tree import tree_leaves

__all__ = ["Group", "group_nodes"]

_VIEWS = frozenset({
    "chunk", "contiguous", "data", "detach", "expand", "expand_as", "flatten", "getitem", "movedim",
    "mT", "narrow", "permute", "reshape", "select", "size", "split", "squeeze", "swapaxes", "t", "T",
    "to", "transpose", "type", "unbind", "unflatten", "unsqueeze", "view", "view_as",
})  # fmt: skip


@dataclass(kw_only=True)
class Group:
    """One layer: its name, its kind, and the positions of its nodes in the recording, in order."""

    name: str
    kind: str
    nodes: list[int] = field(default_factory=list)


def group_nodes(recording: Recording, root: nn.Module, taken: set[str]) -> list[Group]:
    """Return the layers of a recording in execution order.

    Parameters
    ----------
    recording
        What one call of ``root`` did.
    root
        The model; tells parameters from buffers, and names modules.
    taken
        Names that are in use already (the inputs); filled with the new ones.
    """
    parameters = {name for name, _ in root.named_parameters(remove_duplicate=False)}
    nodes = recording.nodes
    live = _live(recording)
    constant = _constants(recording, parameters)
    rows = _rows(nodes, [i for i in live if i not in constant], parameters)
    rows = _merged(rows, recording.glued)
    calls: dict[int, int] = {}
    for i in live:
        if i not in constant:
            calls[nodes[i].call] = calls.get(nodes[i].call, 0) + 1
    groups = []
    for row in rows:
        group = _named([nodes[i] for i in row], root, calls, taken)
        group.nodes = sorted(set(row) | _behind(row, recording, constant))
        groups.append(group)
    return groups


def _live(recording: Recording) -> list[int]:
    """Return the nodes that something depends on: leaf modules, writers, and what feeds them."""
    needed = {leaf for leaf in tree_leaves(recording.output) if isinstance(leaf, Value)}
    found = []
    for i in reversed(range(len(recording.nodes))):
        node = recording.nodes[i]
        writes = any(recording.facts[value.number].storage in node.writes for value in node.reads)
        if isinstance(node.target, str) or node.random or writes or needed.intersection(node.makes):
            found.append(i)
            needed.update(node.reads)
    return found[::-1]


def _constants(recording: Recording, parameters: set[str]) -> set[int]:
    """Return the nodes that compute from constants only, unless the model returns them."""
    inputs = {leaf for _, tree in recording.inputs for leaf in tree_leaves(tree) if isinstance(leaf, Value)}
    varying: set[Value] = set(inputs)
    found = set()
    for i, node in enumerate(recording.nodes):
        free = not (isinstance(node.target, str) or node.random)
        if free and not varying.intersection(node.reads) and not parameters.intersection(node.attributes):
            found.add(i)
        else:
            varying.update(node.makes)
    returned = {leaf for leaf in tree_leaves(recording.output) if isinstance(leaf, Value)}
    for i in sorted(found, reverse=True):
        if returned.intersection(recording.nodes[i].makes):
            found.discard(i)
            returned.update(recording.nodes[i].reads)
    return found


def _behind(row: list[int], recording: Recording, constant: set[int]) -> set[int]:
    """Return the constant nodes that the nodes of a row depend on, and those that write to these."""
    nodes, facts = recording.nodes, recording.facts
    maker = {value: i for i in constant for value in nodes[i].makes}
    writers: dict[int, list[int]] = {}
    for i in constant:
        for storage in nodes[i].writes:
            writers.setdefault(storage, []).append(i)
    found: set[int] = set()
    todo = [maker[v] for i in row for v in nodes[i].reads if v in maker]
    while todo:
        i = todo.pop()
        if i not in found:
            found.add(i)
            todo += [maker[v] for v in nodes[i].reads if v in maker]
            todo += [w for v in nodes[i].makes for w in writers.get(facts[v.number].storage, ())]
    return found


def _rows(nodes: list[Node], order: list[int], parameters: set[str]) -> list[list[int]]:
    rows: list[list[int]] = []
    with_parameter = False
    for i in order:
        node = nodes[i]
        reads = bool(parameters.intersection(node.attributes))
        last = nodes[rows[-1][-1]] if rows else None
        joins = (
            last is not None
            and not isinstance(node.target, str)
            and not isinstance(last.target, str)
            and node.call == last.call
            and not (reads and with_parameter)
        )
        if joins:
            rows[-1].append(i)
            with_parameter |= reads
        else:
            rows.append([i])
            with_parameter = reads
    return rows


def _merged(rows: list[list[int]], glued: list[tuple[int, int]]) -> list[list[int]]:
    """Join the rows that lie between the two ends of each glued pair."""
    merged: list[list[int]] = []
    for row in rows:
        joined = bool(merged) and any(first <= merged[-1][-1] and last >= row[0] for first, last in glued)
        if joined:
            merged[-1] += row
        else:
            merged.append(list(row))
    return merged


def _named(row: list[Node], root: nn.Module, calls: dict[int, int], taken: set[str]) -> Group:
    first = row[0]
    leaves = [node.target for node in row if isinstance(node.target, str)]
    if leaves:
        name, kind = leaves[0], type(root.get_submodule(leaves[0])).__name__
    elif first.owner and len(row) == calls[first.call] and len({node.call for node in row}) == 1:
        name, kind = first.owner, type(root.get_submodule(first.owner)).__name__
    else:
        operators = [operator_name(node.target) for node in row]
        kind = next((o for o in operators if o not in _VIEWS), operators[0])
        name = f"{first.owner}.{kind}" if first.owner else kind
    unique, count = name, 0
    while unique in taken:
        count += 1
        unique = f"{name}_{count}"
    taken.add(unique)
    return Group(name=unique, kind=kind)


def operator_name(target: str | Callable[..., Any]) -> str:
    """Return the plain name of a torch function: ``add`` for ``Tensor.__iadd__`` and ``Tensor.add_``."""
    name = str(getattr(target, "__name__", target))
    if name == "__get__":
        return str(getattr(getattr(target, "__self__", None), "__name__", "get"))
    plain = name.strip("_")
    if name.startswith("__") and plain[:1] in "ri" and plain[1:] in (
        "add", "sub", "mul", "truediv", "floordiv", "pow", "matmul", "and", "or", "xor", "div",
    ):  # fmt: skip
        plain = plain[1:]
    return plain
