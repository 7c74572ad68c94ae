"""Where a layer graph may be cut: downward-closed sets of layers, in order.

A *cut* is a set of layers that holds, with every layer, all layers that it reads from; a
stage is the difference of two nested cuts.  Small graphs yield all their cuts; large ones
have too many (a module of four branches of six layers has thousands), so that layers in
series are first joined, and in the end only the prefixes of two execution orders are kept:
the given one and one that keeps the bytes alive small.
"""

from __future__ import annotations

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

__all__ = ["MAX_CUTS", "Cuts", "cuts_of", "trained_layers"]

MAX_CUTS = 1700
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
    forward_s, backward_s, parameter_bytes, gradient_bytes, buffer_bytes, saved_bytes
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

    def layers(self, outer: int, inner: int) -> tuple[str, ...]:
        """Return the names of the layers between cut ``inner`` and the larger cut ``outer``, in order."""
        names = self.profile.graph.layers
        return tuple(names[i].name for i in np.flatnonzero(self.members[outer] & ~self.members[inner]))


def trained_layers(graph: LayerGraph) -> tuple[list[bool], list[bool]]:
    """Return, for each layer, whether it is trained, and whether its outputs depend on a trained one."""
    trained = [layer.trainable and bool(layer.parameters) for layer in graph.layers]
    depends: list[bool] = []
    for layer, own in zip(graph.layers, trained, strict=True):
        depends.append(own or any(depends[graph.index[ref.layer]] for ref in layer.inputs))
    return trained, depends


def cuts_of(profile: Profile, limit: int = MAX_CUTS) -> Cuts:
    """Return the cuts of a profile's graph: all of them when there are at most ``limit``.

    Raises
    ------
    InputError
        The profile has no layer that computes.
    """
    graph = profile.graph
    compute = [i for i, layer in enumerate(graph.layers) if layer.kind != INPUT]
    if not compute:
        raise InputError("the profile holds no layer besides the inputs; profile a model with layers")
    before = [{graph.index[ref.layer] for ref in layer.inputs} & set(compute) for layer in graph.layers]
    masks = _ideals([[i] for i in compute], before, limit)
    complete = masks is not None
    if masks is None:
        orders = [compute, _small_order(profile, compute, before)]
        prefixes = [order[:n] for order in orders for n in range(len(order) + 1)]
        masks = [sum(1 << i for i in prefix) for prefix in prefixes]
        joined = _ideals(_series(graph, compute, before), before, limit - len(set(masks)))
        masks += joined or []
    return _measured(profile, masks, complete)


def _ideals(groups: Sequence[Sequence[int]], before: Sequence[set[int]], limit: int) -> list[int] | None:
    """Return all downward-closed unions of groups as bit masks of layers, or None when over the limit."""
    bits = [sum(1 << i for i in group) for group in groups]
    needs = [sum(1 << i for i in set().union(*(before[i] for i in group)) - set(group)) for group in groups]
    found = {0}
    fresh = [0]
    while fresh:
        grown = {
            mask | bit
            for mask in fresh
            for bit, need in zip(bits, needs, strict=True)
            if not mask & bit and need & mask == need
        }
        fresh = sorted(grown - found)
        found.update(fresh)
        if len(found) > limit:
            return None
    return sorted(found)


def _series(graph: LayerGraph, compute: Sequence[int], before: Sequence[set[int]]) -> list[list[int]]:
    """Join layers in series: each one that alone reads the only output of the one before it."""
    readers: dict[int, set[int]] = {i: set() for i in compute}
    for i in compute:
        for j in before[i]:
            readers[j].add(i)
    group: dict[int, list[int]] = {}
    groups: list[list[int]] = []
    for i in compute:
        (only,) = before[i] if len(before[i]) == 1 else (None,)
        if only is not None and len(readers[only]) == 1:
            group[i] = group[only]
        else:
            group[i] = []
            groups.append(group[i])
        group[i].append(i)
    return groups


def _small_order(profile: Profile, compute: Sequence[int], before: Sequence[set[int]]) -> list[int]:
    """Return an execution order that keeps the bytes that are alive small, greedily."""
    readers: dict[int, set[int]] = {i: set() for i in compute}
    for i in compute:
        for j in before[i]:
            readers[j].add(i)
    size = [cost.output_bytes for cost in profile.costs]
    waiting = {i: len(before[i]) for i in compute}
    unread = {i: len(readers[i]) for i in compute}
    ready = [i for i in compute if not waiting[i]]
    order: list[int] = []
    while ready:
        chosen = min(ready, key=lambda i: (size[i] - sum(size[j] for j in before[i] if unread[j] == 1), -i))
        ready.remove(chosen)
        order.append(chosen)
        for j in before[chosen]:
            unread[j] -= 1
        for i in sorted(readers[chosen]):
            waiting[i] -= 1
            if not waiting[i]:
                ready.append(i)
    return order


def _bits(masks: Iterable[int], count: int) -> NDArray[np.bool_]:
    width = -(-count // 8)
    rows = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in masks), dtype=np.uint8)
    return np.unpackbits(rows.reshape(-1, width), axis=1, bitorder="little")[:, :count].astype(bool)


def _exact_sums(members: NDArray[np.bool_], values: Sequence[float]) -> Floats:
    """Return the sum of the values of each row's members, in a fixed point in which sums are exact.

    So sums over nested sets never fall, whatever the order of addition; the resolution is
    2^-52 of the total.
    """
    array = np.array(values, dtype=float)
    total = float(array.sum())
    unit = 2.0 ** (math.frexp(total)[1] - 52) if total else 1.0
    units = np.rint(array / unit)
    return np.asarray((members * units).sum(axis=1) * unit)


def _measured(profile: Profile, masks: Iterable[int], complete: bool) -> Cuts:
    """Add up what lies before each cut and what crosses it."""
    graph, costs = profile.graph, profile.costs
    trained, depends = trained_layers(graph)
    members = _bits(sorted(set(masks)), len(graph))
    nonempty = np.asarray(members.any(axis=1))
    members[:, [layer.kind == INPUT for layer in graph.layers]] = nonempty[:, None]

    def summed(values: Sequence[float]) -> Floats:
        return _exact_sums(members, values)

    seconds = summed([c.forward_s + c.backward_s for c in costs])
    members = members[np.lexsort((members.sum(axis=1), seconds))]
    sent, returned = np.zeros(len(members)), np.zeros(len(members))
    read_last = set(graph.outputs)
    for ref, names in {**dict.fromkeys(read_last, ()), **graph.consumers}.items():
        source = graph.index[ref.layer]
        crosses = members[:, source] & ~members[:, [graph.index[name] for name in names]].all(axis=1)
        if ref in read_last:
            crosses |= members[:, source]
        spec = graph.spec(ref)
        sent += crosses * float(spec.nbytes)
        if spec.requires_grad and depends[source]:
            returned += crosses * float(spec.nbytes)
    sent[-1] = returned[-1] = 0.0
    return Cuts(
        profile=profile,
        members=members,
        complete=complete,
        forward_s=summed([c.forward_s for c in costs]),
        backward_s=summed([c.backward_s for c in costs]),
        parameter_bytes=summed([c.parameter_bytes for c in costs]),
        gradient_bytes=summed([c.parameter_bytes * t for c, t in zip(costs, trained, strict=True)]),
        buffer_bytes=summed([c.buffer_bytes for c in costs]),
        saved_bytes=summed([c.saved_bytes for c in costs]),
        sent_bytes=sent,
        returned_bytes=returned,
    )
