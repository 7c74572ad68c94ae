"""Where a layer graph may be cut: downward-closed sets of layers, in order.

A *cut* is a set of layers that holds, with every layer, all layers that it reads from; a
stage is the difference of two nested cuts.  Small graphs yield all their cuts; large ones
have too many (a module of four branches of six layers has thousands), so that layers in
series are first joined, and in the end only the prefixes of two execution orders are kept:
the given one and one that keeps the bytes alive small.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pdmpi.errors import InputError
from pdmpi.graph import LayerGraph
from pdmpi.graph.graph import INPUT
from pdmpi.plan.profile import Profile

__all__ = ["MAX_CUTS", "Cuts", "cuts_of"]

MAX_CUTS = 2000
"""Most cuts that are considered together, unless one execution order alone has more."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cuts:
    """Cuts of a profiled graph with what lies before each, from the empty one to the whole graph.

    Attributes
    ----------
    profile
        The profile.
    members
        Shape (cuts, layers): whether a layer lies before the cut.  Ordered by seconds of
        compute before the cut, then by number of layers, so that a nested pair is in order.
    complete
        Whether these are all cuts of the graph.
    forward_s, backward_s, parameter_bytes, gradient_bytes, buffer_bytes, saved_bytes, split_bytes
        Shape (cuts,): sums over the layers before the cut.
    sent_bytes, returned_bytes
        Shape (cuts,): bytes of values that cross the cut forward, and of gradients that
        cross it backward.  A value with several readers crosses once.
    """

    profile: Profile
    members: NDArray[np.bool_]
    complete: bool
    forward_s: Floats
    backward_s: Floats
    parameter_bytes: Floats
    gradient_bytes: Floats
    buffer_bytes: Floats
    saved_bytes: Floats
    split_bytes: Floats
    sent_bytes: Floats
    returned_bytes: Floats

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every cut holds the one before it."""
        return bool((self.members[:-1] <= self.members[1:]).all())

    @cached_property
    def nested(self) -> NDArray[np.bool_]:
        """Shape (cuts, cuts): whether the first is a proper subset of the second."""
        if self.is_chain:
            return np.triu(np.ones((len(self), len(self)), dtype=bool), 1)
        held = self.members.astype(np.float32)
        common = held @ held.T
        sizes = held.sum(axis=1)
        return np.asarray((common == sizes[:, None]) & (sizes[:, None] < sizes[None, :]))

    @cached_property
    def most_stages(self) -> int:
        """Length of the longest chain of nested cuts."""
        if self.is_chain:
            return len(self) - 1
        longest = np.zeros(len(self), dtype=int)
        for outer in range(1, len(self)):
            longest[outer] = 1 + longest[self.nested[:, outer]].max(initial=0)
        return int(longest[-1])

    @cached_property
    def gaps(self) -> Floats:
        """Shape (cuts, cuts): 0 between nested cuts, in order, and infinite elsewhere."""
        return np.where(self.nested, 0.0, np.inf)

    def subset(self, positions: Sequence[int]) -> Cuts:
        """Return some of the cuts."""
        arrays = {
            field.name: getattr(self, field.name)[list(positions)]
            for field in fields(self)
            if field.name not in ("profile", "complete")
        }
        return replace(self, complete=False, **arrays)

    @cached_property
    def workspace_bytes(self) -> Floats:
        """Shape (cuts, cuts): largest workspace of the layers between two nested cuts."""
        sizes = np.array([cost.workspace_bytes for cost in self.profile.costs], dtype=float)
        found = np.zeros((len(self), len(self)))
        for layer in np.argsort(sizes, kind="stable"):
            if sizes[layer]:
                inside = self.members[:, layer]
                found[np.ix_(~inside, inside)] = sizes[layer]
        return found

    @cached_property
    def graph_bytes(self) -> Floats:
        """Shape (cuts, cuts): `Profile.graph_bytes` of the layers between two nested cuts."""
        costs = self.profile.costs
        needed = np.array([cost.forward_workspace_bytes for cost in costs], dtype=float)
        found = np.zeros((len(self), len(self)))
        later = np.zeros(len(self))  # bytes that the layers behind save, in each cut
        for layer in reversed(range(len(costs))):
            inside = self.members[:, layer]
            if needed[layer]:
                both = np.ix_(~inside, inside)
                between = later[inside] - later[~inside, None]
                found[both] = np.maximum(found[both], needed[layer] - between)
            later += costs[layer].saved_bytes * inside
        return found

    def layers(self, outer: int, inner: int) -> tuple[str, ...]:
        """Return the names of the layers between cut ``inner`` and the larger cut ``outer``, in order."""
        names = self.profile.graph.layers
        return tuple(names[i].name for i in np.flatnonzero(self.members[outer] & ~self.members[inner]))


def cuts_of(profile: Profile, limit: int = MAX_CUTS) -> Cuts:
    """Return the cuts of a profile's graph: all of them when there are at most ``limit``.

    Layers that share a parameter stay in one stage: their gradients would have to be summed
    between stages before each step.  Cuts that are never better than another one are left
    out: those that part a layer from readers that cost nothing and return no more than it does
    (views), and those that leave behind a layer that costs nothing and returns nothing.

    Raises
    ------
    InputError
        The profile has no layer that computes.
    """
    graph = profile.graph
    compute = [i for i, layer in enumerate(graph.layers) if layer.kind != INPUT]
    if not compute:
        raise InputError("the profile holds no layer besides the inputs; profile a model with layers")
    computing = set(compute)
    sources = [{graph.index[ref.layer] for ref in layer.inputs} & computing for layer in graph.layers]
    blank = _blank(profile, compute, sources)
    readers = _readers(compute, sources)
    groups = _with_views(profile, [i for i in compute if i not in blank], sources, readers)
    nodes = _condensed(groups, sources)
    masks = _ideals(nodes, limit)
    complete = masks is not None
    together = [_mask(group) for group in shared_layers(graph)]
    if masks is None:
        orders = [list(range(len(nodes))), _small_order(profile, nodes)]
        chains = [_prefixes(nodes, order) for order in orders]
        joined = _ideals(_condensed(_series(nodes), sources), limit - 2 * len(nodes))
        masks = chains[0] + chains[1] + (joined or [])
        if len(set(masks)) > limit:
            kept = [_keeping(chain, together) for chain in chains]
            measured = [_measured(profile, chain, blank, False) for chain in kept]
            return max(measured, key=lambda cuts: (len(cuts), -float(cuts.sent_bytes.sum())))
    return _measured(profile, _keeping(masks, together), blank, complete)


def shared_layers(graph: LayerGraph) -> list[list[int]]:
    """Return groups of layers that read one and the same parameter, directly or by a tie of names."""
    name_of = {name: group[0] for group in graph.ties for name in group}
    found: dict[str, list[int]] = {}
    for i, layer in enumerate(graph.layers):
        for name in dict.fromkeys(name_of.get(name, name) for name in layer.parameters):
            found.setdefault(name, []).append(i)
    return [group for group in found.values() if len(group) > 1]


def _keeping(masks: Iterable[int], together: Sequence[int]) -> list[int]:
    """Return the cuts that part no group of layers."""
    return [mask for mask in masks if all(mask & group in (0, group) for group in together)]


@dataclass(frozen=True, slots=True)
class _Node:
    """Layers that are never parted, as a bit mask, and the layers that must lie before them."""

    layers: tuple[int, ...]
    sources: frozenset[int]
    mask: int
    needs: int


def _mask(layers: Iterable[int]) -> int:
    return sum(1 << i for i in layers)


def _condensed(groups: Iterable[Sequence[int]], sources: Sequence[set[int]]) -> list[_Node]:
    nodes = []
    for group in groups:
        needed = frozenset().union(*(sources[i] for i in group)) - set(group)
        nodes.append(_Node(tuple(group), needed, _mask(group), _mask(needed)))
    return nodes


def _readers(compute: Iterable[int], sources: Sequence[set[int]]) -> dict[int, set[int]]:
    readers: dict[int, set[int]] = {i: set() for i in compute}
    for i in readers:
        for j in sources[i]:
            readers[j].add(i)
    return readers


def _costs_nothing(profile: Profile, layer: int) -> bool:
    cost = profile.costs[layer]
    return not (
        cost.forward_s or cost.backward_s or cost.parameter_bytes or cost.buffer_bytes or cost.saved_bytes
        or cost.workspace_bytes
    )  # fmt: skip


def _blank(profile: Profile, compute: Sequence[int], sources: list[set[int]]) -> set[int]:
    """Return layers that cost nothing and return nothing, like all before them; forget them as sources."""
    found: set[int] = set()
    for i in compute:
        size = sum(spec.nbytes for spec in profile.graph.layers[i].outputs)
        inputs = [profile.graph.spec(ref).nbytes for ref in profile.graph.layers[i].inputs]
        if _costs_nothing(profile, i) and not size and not any(inputs) and sources[i] <= found:
            found.add(i)
    if len(found) == len(compute):
        return set()
    for i in compute:
        sources[i] -= found
    return found


def _with_views(
    profile: Profile, compute: Sequence[int], sources: Sequence[set[int]], readers: dict[int, set[int]]
) -> list[list[int]]:
    """Group every layer with its readers where these cost nothing and return no more than it does."""
    graph = profile.graph
    returned = {graph.index[ref.layer] for ref in graph.outputs}
    size = [sum(spec.nbytes for spec in layer.outputs) for layer in graph.layers]
    only_source = [len({ref.layer for ref in layer.inputs}) == 1 for layer in graph.layers]
    group: dict[int, list[int]] = {}
    groups: list[list[int]] = []
    for i in compute:
        if i not in group:
            group[i] = [i]
            groups.append(group[i])
        views = sorted(readers[i])
        together = (
            views
            and i not in returned
            and all(_costs_nothing(profile, v) and only_source[v] for v in views)
            and sum(size[v] for v in views) <= size[i]
        )
        for v in views if together else ():
            group[v] = group[i]
            group[i].append(v)
    return [sorted(members) for members in groups]


def _prefixes(nodes: Sequence[_Node], order: Sequence[int]) -> list[int]:
    return list(itertools.accumulate((nodes[n].mask for n in order), int.__or__, initial=0))


def _ideals(nodes: Sequence[_Node], limit: int) -> list[int] | None:
    """Return all downward-closed unions of nodes as masks of layers, or None when over the limit."""
    found = {0}
    fresh = [0]
    while fresh:
        grown: set[int] = set()
        for mask in fresh:
            grown.update(
                mask | node.mask for node in nodes if not mask & node.mask and node.needs & mask == node.needs
            )
            if len(found) + len(grown) > limit:
                return None
        found |= grown
        fresh = sorted(grown)
    return sorted(found)


def _links_of(nodes: Sequence[_Node]) -> tuple[list[set[int]], list[set[int]]]:
    """Return the nodes before and behind each node."""
    node_of = {layer: n for n, node in enumerate(nodes) for layer in node.layers}
    before = [{node_of[i] for i in node.sources} for node in nodes]
    behind: list[set[int]] = [set() for _ in nodes]
    for n, needed in enumerate(before):
        for a in needed:
            behind[a].add(n)
    return before, behind


def _series(nodes: Sequence[_Node]) -> list[list[int]]:
    """Join nodes in series: each one that alone reads the only node before it."""
    before, behind = _links_of(nodes)
    group: dict[int, list[int]] = {}
    groups: list[list[int]] = []
    for n, node in enumerate(nodes):
        only = next(iter(before[n])) if len(before[n]) == 1 else None
        if only is not None and len(behind[only]) == 1:
            group[n] = group[only]
        else:
            group[n] = []
            groups.append(group[n])
        group[n].extend(node.layers)
    return groups


def _small_order(profile: Profile, nodes: Sequence[_Node]) -> list[int]:
    """Return an execution order that keeps the bytes that are alive small, greedily."""
    before, behind = _links_of(nodes)
    size = [profile.costs[node.layers[-1]].output_bytes for node in nodes]
    waiting, unread = [len(b) for b in before], [len(b) for b in behind]
    ready = [n for n in range(len(nodes)) if not waiting[n]]
    order: list[int] = []
    while ready:
        chosen = min(ready, key=lambda n: (size[n] - sum(size[a] for a in before[n] if unread[a] == 1), -n))
        ready.remove(chosen)
        order.append(chosen)
        for a in before[chosen]:
            unread[a] -= 1
        for n in sorted(behind[chosen]):
            waiting[n] -= 1
            if not waiting[n]:
                ready.append(n)
    return order


def _bits(masks: Iterable[int], count: int) -> NDArray[np.bool_]:
    width = -(-count // 8)
    rows = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in masks), dtype=np.uint8)
    return np.unpackbits(rows.reshape(-1, width), axis=1, bitorder="little")[:, :count].astype(bool)


def _fixed_point(values: Sequence[float]) -> Floats:
    """Return the values rounded to 2^-52 of their total, so that sums of any of them are exact.

    So sums over nested sets never fall, whatever the order of addition.
    """
    array = np.array(values, dtype=float)
    total = float(array.sum())
    unit = 2.0 ** (math.frexp(total)[1] - 52) if total else 1.0
    return np.asarray(np.rint(array / unit) * unit)


def _measured(profile: Profile, masks: Iterable[int], blank: Iterable[int], complete: bool) -> Cuts:
    """Add up what lies before each cut and what crosses it."""
    graph, costs = profile.graph, profile.costs
    members = _bits(sorted(set(masks)), len(graph))
    nonempty = np.asarray(members.any(axis=1))
    given = [i for i, layer in enumerate(graph.layers) if layer.kind == INPUT]
    members[:, [*given, *blank]] = nonempty[:, None]
    columns: list[list[float]] = [
        [c.forward_s for c in costs],
        [c.backward_s for c in costs],
        [c.parameter_bytes for c in costs],
        [c.parameter_bytes * t for c, t in zip(costs, graph.trained, strict=True)],
        [c.buffer_bytes for c in costs],
        [c.saved_bytes for c in costs],
        [c.split_bytes for c in costs],
    ]
    sums = members.astype(float) @ np.stack([_fixed_point(column) for column in columns], axis=1)
    order = np.lexsort((members.sum(axis=1), sums[:, 0] + sums[:, 1]))
    members = members[order]
    forward, backward, parameters, gradients, buffers, saved, split = np.ascontiguousarray(sums[order].T)
    sent, returned = np.zeros(len(members)), np.zeros(len(members))
    read_last = set(graph.outputs)
    for ref, names in {**dict.fromkeys(graph.outputs, ()), **graph.consumers}.items():
        source = graph.index[ref.layer]
        crosses = members[:, source] & ~members[:, [graph.index[name] for name in names]].all(axis=1)
        if ref in read_last:
            crosses |= members[:, source]
        nbytes = float(graph.spec(ref).nbytes)
        sent += crosses * nbytes
        if graph.returns_gradient(ref):
            returned += crosses * nbytes
    sent[-1] = returned[-1] = 0.0
    return Cuts(
        profile=profile,
        members=members,
        complete=complete,
        forward_s=forward,
        backward_s=backward,
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        buffer_bytes=buffers,
        saved_bytes=saved,
        split_bytes=split,
        sent_bytes=sent,
        returned_bytes=returned,
    )
