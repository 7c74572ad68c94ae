"""From a recording to the layer graph: names, edges, shapes, and what each layer holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from pdmpi.errors import InputError
from pdmpi.graph import Layer, LayerGraph, Ref, TensorSpec
from pdmpi.graph.graph import INPUT
from pdmpi.model.group import Group, group_nodes
from pdmpi.model.recording import Attribute, Recording, Value
from pdmpi.model.tree import tree_leaves

__all__ = ["LayerState", "Layers", "layers_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """What a layer holds: submodules taken whole, and single tensors, by their paths in the model."""

    modules: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The layer graph, and for each layer its calls, its state, and the values behind its outputs.

    Attributes
    ----------
    graph
        The layers.
    members
        Positions of each layer's calls in the recording, in order.
    state
        What each layer holds.
    value_of
        The recorded value behind each value of the graph.
    """

    graph: LayerGraph
    members: Mapping[str, tuple[int, ...]]
    state: Mapping[str, LayerState]
    value_of: Mapping[Ref, Value]


def layers_of(recording: Recording, module: nn.Module) -> Layers:
    """Return the layers of a recorded model.

    Raises
    ------
    InputError
        When the model returns no tensor, or one of its own tensors.
    """
    taken: set[str] = set()
    ref_of: dict[Value, Ref] = {}
    layers: list[Layer] = []
    module_names = {path for path, _ in module.named_modules()}
    for given, tree in recording.inputs:
        values = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Value)]
        name = given
        while name in module_names or name in taken:
            name = f"{name}_"
        if values:
            taken.add(name)
            ref_of.update({value: Ref(name, i) for i, value in enumerate(values)})
            specs = tuple(_spec(recording, value) for value in values)
            layers.append(Layer(name=name, kind=INPUT, outputs=specs, trainable=False))
    groups = group_nodes(recording, module, taken)
    names = _StateNames(module)
    state: dict[str, LayerState] = {layer.name: LayerState() for layer in layers}
    members: dict[str, tuple[int, ...]] = {layer.name: () for layer in layers}
    outside = _read_outside(recording, groups)
    for group in groups:
        made = [value for i in group.nodes for value in recording.nodes[i].makes]
        inside = set(made)
        used = [value for value in made if value in outside[group.name]]
        used = used or list(recording.nodes[group.nodes[-1]].results[:1])
        reads = [v for i in group.nodes for v in recording.nodes[i].reads if v not in inside]
        ref_of.update({value: Ref(group.name, i) for i, value in enumerate(used)})
        state[group.name] = names.of(recording, group)
        members[group.name] = tuple(group.nodes)
        parameters = names.parameters(state[group.name])
        layers.append(
            Layer(
                name=group.name,
                kind=group.kind,
                inputs=tuple(dict.fromkeys(ref_of[v] for v in reads)),
                outputs=tuple(_spec(recording, value) for value in used),
                parameters=parameters,
                trainable=any(names.trained(name) for name in parameters),
            )
        )
    outputs = _outputs(recording, ref_of)
    if groups:
        state[groups[0].name] = names.with_rest(state, groups[0].name)
    return Layers(
        graph=LayerGraph(layers=tuple(layers), outputs=outputs, ties=names.ties(layers)),
        members=members,
        state=state,
        value_of={ref: value for value, ref in ref_of.items()},
    )


def _spec(recording: Recording, value: Value) -> TensorSpec:
    fact = recording.facts[value.number]
    return TensorSpec(
        shape=fact.shape, dtype=str(fact.dtype).removeprefix("torch."), requires_grad=fact.requires_grad
    )


def _outputs(recording: Recording, ref_of: Mapping[Value, Ref]) -> tuple[Ref, ...]:
    leaves = list(tree_leaves(recording.output))
    if any(isinstance(leaf, Attribute) for leaf in leaves):
        path = next(leaf.path for leaf in leaves if isinstance(leaf, Attribute))
        raise InputError(f"the model returns its tensor {path!r} itself; return a result computed from it")
    refs = tuple(dict.fromkeys(ref_of[leaf] for leaf in leaves if isinstance(leaf, Value)))
    if not refs:
        raise InputError(
            "the model returns no tensor; its forward must return what the loss is computed from"
        )
    return refs


def _read_outside(recording: Recording, groups: Sequence[Group]) -> dict[str, set[Value]]:
    """Return, for each group, the values that other groups, or the caller of the model, read."""
    constant: dict[int, int] = {}
    for group in groups:
        for i in group.nodes:
            constant[i] = constant.get(i, 0) + 1
    returned = {leaf for leaf in tree_leaves(recording.output) if isinstance(leaf, Value)}
    readers: dict[Value, set[str]] = {}
    for group in groups:
        for i in group.nodes:
            for value in recording.nodes[i].reads:
                readers.setdefault(value, set()).add(group.name)
    found: dict[str, set[Value]] = {}
    for group in groups:
        own = {v for i in group.nodes if constant[i] == 1 for v in recording.nodes[i].makes}
        found[group.name] = {v for v in own if v in returned or readers.get(v, set()) - {group.name}}
    return found


class _StateNames:
    """Which tensors and submodules of the model belong to which layer."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._parameters = dict(root.named_parameters(remove_duplicate=False))
        self._paths: dict[int, list[str]] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), []).append(path)

    def of(self, recording: Recording, group: Group) -> LayerState:
        """Return what a group's calls need."""
        modules: dict[str, None] = {}
        tensors: dict[str, None] = {}
        for i in group.nodes:
            node = recording.nodes[i]
            if isinstance(node.target, str):
                modules.update(dict.fromkeys(self._paths[id(self._root.get_submodule(node.target))]))
            tensors.update(dict.fromkeys(node.attributes))
        return LayerState(modules=tuple(modules), tensors=tuple(tensors))

    def parameters(self, state: LayerState) -> tuple[str, ...]:
        """Return the names of the parameters that a layer reads."""
        names = dict.fromkeys(path for path in state.tensors if path in self._parameters)
        for path in state.modules:
            held = self._root.get_submodule(path).named_parameters(path, remove_duplicate=False)
            names.update(dict.fromkeys(name for name, _ in held))
        return tuple(names)

    def trained(self, name: str) -> bool:
        """Whether a parameter is trained."""
        return self._parameters[name].requires_grad

    def ties(self, layers: Sequence[Layer]) -> tuple[tuple[str, ...], ...]:
        """Return the groups of names, among those that layers read, that are one parameter."""
        groups: dict[int, dict[str, None]] = {}
        for name in (name for layer in layers for name in layer.parameters):
            groups.setdefault(id(self._parameters[name]), {})[name] = None
        return tuple(tuple(names) for names in groups.values() if len(names) > 1)

    def with_rest(self, state: Mapping[str, LayerState], first: str) -> LayerState:
        """Return the first layer's state, with the tensors added that no layer reads."""
        modules = {path for s in state.values() for path in s.modules}
        tensors = {path for s in state.values() for path in s.tensors}
        rest = [
            name
            for source in (self._parameters, dict(self._root.named_buffers(remove_duplicate=False)))
            for name in source
            if name not in tensors and modules.isdisjoint(_parents(name))
        ]
        return LayerState(modules=state[first].modules, tensors=(*state[first].tensors, *rest))


def _parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]
