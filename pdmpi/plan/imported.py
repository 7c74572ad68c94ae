"""Profiles that the original PipeDream wrote (``graph.txt``), read as ours.

One node a line, ``nodeID -- DESCRIPTION -- forward_compute_time=MS, backward_compute_time=MS,
activation_size=BYTES, parameter_size=BYTES``, and one edge a line, ``<tab>nodeA -- nodeB``.
Inputs (``Input...``) cost nothing here: their time is data loading.  Unused
``__getitem__`` sinks are left out.  The file says nothing about what autograd keeps: a layer
is taken to keep as many bytes as it returns, and nothing when it works in place or takes no time (a
view).
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdmpi.errors import InputError
from pdmpi.graph import Layer, LayerGraph, Ref, TensorSpec
from pdmpi.graph.graph import INPUT
from pdmpi.plan.profile import LayerCost, Profile

__all__ = ["import_profile", "parse_graph"]

_NODE = re.compile(
    r"(?P<name>\S+) -- (?P<text>.*) -- forward_compute_time=(?P<forward>[^,\s]+), "
    r"backward_compute_time=(?P<backward>[^,\s]+), activation_size=(?P<activation>\[[^\]]*\]|[^,\s]+), "
    r"parameter_size=(?P<parameter>[^,\s]+)(?: -- stage_id=-?\d+)?\s*"
)
_EDGE = re.compile(r"\t(\S+) -- (\S+)\s*")
_UNUSED = "__getitem__"
_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class _Node:
    name: str
    text: str
    forward_s: float
    backward_s: float
    activation_bytes: int
    parameter_bytes: int


def _number(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{what} = {text!r} is no number") from None
    if not (math.isfinite(value) and 0 <= value < 1e15):
        raise InputError(f"{what} = {text} must be finite and not negative")
    return value


def _node(match: re.Match[str]) -> _Node:
    sizes = match["activation"].strip("[]").split(";")
    return _Node(
        name=match["name"],
        text=match["text"],
        forward_s=_number(match["forward"], "forward_compute_time") / 1e3,
        backward_s=_number(match["backward"], "backward_compute_time") / 1e3,
        activation_bytes=round(sum(_number(size.strip(), "activation_size") for size in sizes)),
        parameter_bytes=round(_number(match["parameter"], "parameter_size")),
    )


def parse_graph(text: str, source: str = "graph.txt", microbatch_size: int = 1) -> Profile:
    """Return the profile that the text of a ``graph.txt`` describes.

    Raises
    ------
    InputError
        A line is broken (the message has its number), an edge names an unknown node, there
        is a cycle, or there is no node.
    """
    nodes: dict[str, _Node] = {}
    edges: list[tuple[int, str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        edge, node = _EDGE.fullmatch(line), _NODE.fullmatch(line)
        try:
            if edge:
                edges.append((number, edge[1], edge[2]))
            elif node:
                if node["name"] in nodes:
                    raise InputError(f"node {node['name']!r} is there twice")
                nodes[node["name"]] = _node(node)
            else:
                raise InputError("neither a node nor an edge of a PipeDream profile")
        except InputError as error:
            raise InputError(f"{source}, line {number}: {error}") from None
    for number, *ends in edges:
        for end in ends:
            if end not in nodes:
                raise InputError(f"{source}, line {number}: edge to {end!r}, which no line describes")
    if not nodes:
        raise InputError(f"{source} holds no node; is it a PipeDream profile?")
    try:
        return _profile(nodes, [(a, b) for _, a, b in edges], microbatch_size)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def _profile(nodes: Mapping[str, _Node], edges: list[tuple[str, str]], microbatch_size: int) -> Profile:
    read = {a for a, _ in edges}
    kept = {name: node for name, node in nodes.items() if name in read or not node.text.startswith(_UNUSED)}
    before: dict[str, list[str]] = {name: [] for name in kept}
    for a, b in dict.fromkeys(edges):
        if a in kept and b in kept:
            before[b].append(a)
    order = _execution_order(kept, before)
    position = {name: i for i, name in enumerate(order)}
    layers, costs = [], []
    for name in order:
        node = kept[name]
        is_input, in_place = node.text.startswith(INPUT), "inplace" in node.text
        layers.append(
            Layer(
                name=name,
                kind=INPUT if is_input else node.text.split("(")[0].strip() or "?",
                inputs=tuple(Ref(a) for a in sorted(before[name], key=position.__getitem__)),
                outputs=(_spec(node.activation_bytes, microbatch_size, requires_grad=not is_input),),
                parameters=(f"{name}.weight",) if node.parameter_bytes and not is_input else (),
            )
        )
        costs.append(
            LayerCost(forward_s=0.0, backward_s=0.0, output_bytes=node.activation_bytes)
            if is_input
            else LayerCost(
                forward_s=node.forward_s,
                backward_s=node.backward_s,
                output_bytes=node.activation_bytes,
                parameter_bytes=node.parameter_bytes,
                saved_bytes=0
                if in_place or not (node.forward_s or node.backward_s)
                else node.activation_bytes,
            )
        )
    readers = {a for names in before.values() for a in names}
    sinks = tuple(Ref(name) for name in order if name not in readers)
    return Profile(
        graph=LayerGraph(tuple(layers), sinks),
        costs=tuple(costs),
        microbatch_size=microbatch_size,
        machine={"source": "PipeDream profile"},
    )


def _spec(nbytes: int, microbatch_size: int, requires_grad: bool) -> TensorSpec:
    elements, odd = divmod(nbytes, 4 * microbatch_size)
    if odd:
        return TensorSpec(shape=(1, nbytes), dtype="uint8", requires_grad=requires_grad)
    return TensorSpec(shape=(microbatch_size, elements), requires_grad=requires_grad)


def _execution_order(nodes: Mapping[str, _Node], before: Mapping[str, list[str]]) -> list[str]:
    """Return the nodes so that each follows what it reads, lowest number first."""

    def key(name: str) -> tuple[int, str]:
        digits = re.search(r"\d+$", name)
        return (int(digits[0]) if digits else 0, name)

    waiting = {name: len(names) for name, names in before.items()}
    after: dict[str, list[str]] = {name: [] for name in nodes}
    for name, names in before.items():
        for a in names:
            after[a].append(name)
    ready = [key(name) for name in nodes if not waiting[name]]
    heapq.heapify(ready)
    order = []
    while ready:
        name = heapq.heappop(ready)[1]
        order.append(name)
        for b in after[name]:
            waiting[b] -= 1
            if not waiting[b]:
                heapq.heappush(ready, key(b))
    if len(order) < len(nodes):
        stuck = sorted((name for name in nodes if waiting[name]), key=key)
        raise InputError(f"the graph has a cycle through {stuck[0]!r}; a profile must be acyclic")
    return order


def import_profile(path: Path, microbatch_size: int = 1) -> Profile:
    """Read a ``graph.txt``; see `parse_graph` for what is refused."""
    try:
        if Path(path).stat().st_size > _MAX_BYTES:
            raise InputError(f"{path} is too large for a profile")
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    return parse_graph(text, str(path), microbatch_size)
