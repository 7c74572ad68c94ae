"""From a user's module to the layer graph, without the module's memory."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pdmpi.config.run import ModelConfig
from pdmpi.errors import InputError
from pdmpi.graph import LayerGraph, Ref
from pdmpi.graph.graph import INPUT
from pdmpi.model.compare import Differs, with_batch_size, with_evaluation
from pdmpi.model.deferred import Tape, cast, storage_id
from pdmpi.model.factory import load_factory
from pdmpi.model.layers import Layers, LayerState, layers_of
from pdmpi.model.no_compiler import without_compiler
from pdmpi.model.record import record
from pdmpi.model.recording import CannotFollow, Node, Recording, Value
from pdmpi.model.tree import map_tree, tensors_of, tree_leaves

__all__ = ["TracedModel", "trace_model"]

_CONTAINERS = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
)  # fmt: skip


@dataclass(kw_only=True)
class TracedModel:
    """A model that has been run once without memory: its graph, and all that a stage is built from.

    Attributes
    ----------
    module
        The model, its tensors on ``meta``.
    tape
        Makes its tensors real.
    seed, dtype
        As given to `trace_model`.
    recording
        Its calls.
    graph
        Its layers.
    members
        Positions of each layer's calls in the recording.
    state
        What each layer holds.
    value_of
        The recorded value behind each value of the graph.
    opaque
        Submodules that are one layer since they cannot be looked into, with the reason.
    notes
        What else the user may want to know.
    """

    module: nn.Module
    tape: Tape
    seed: int
    dtype: torch.dtype
    recording: Recording
    graph: LayerGraph
    members: Mapping[str, tuple[int, ...]]
    state: Mapping[str, LayerState]
    value_of: Mapping[Ref, Value]
    opaque: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def boundary(self, layers: Iterable[str], *, is_last: bool) -> tuple[tuple[Ref, ...], tuple[Ref, ...]]:
        """Return the values that a stage of these layers takes, and those that it returns."""
        inside = set(layers)
        taken: dict[Ref, None] = {}
        given: dict[Ref, None] = dict.fromkeys(self.graph.outputs) if is_last else {}
        for layer in self.graph.layers:
            if layer.name in inside:
                if layer.kind == INPUT:
                    taken.update(dict.fromkeys(Ref(layer.name, i) for i in range(len(layer.outputs))))
                taken.update(dict.fromkeys(ref for ref in layer.inputs if ref.layer not in inside))
            else:
                given.update(dict.fromkeys(ref for ref in layer.inputs if ref.layer in inside))
        if is_last:
            taken.update(dict.fromkeys(ref for ref in self.graph.outputs if ref.layer not in inside))
        else:
            given.update(dict.fromkeys(ref for ref in self.graph.outputs if ref.layer in inside))
        index = self.graph.index
        return tuple(taken), tuple(sorted(given, key=lambda ref: (index[ref.layer], ref.output)))

    def remarks(self) -> list[str]:
        """Return, a line each, which submodules are one layer and why, and the other notes."""
        kept = [f"{path!r} is one layer: {reason}" for path, reason in self.opaque.items()]
        return kept + list(self.notes)

    def tensors_of(self, layer: str) -> list[Tensor]:
        """Return the parameters and buffers that a layer holds, on ``meta``."""
        found: list[Tensor] = []
        for path in self.state[layer].modules:
            held = self.module.get_submodule(path)
            found += [*held.parameters(), *held.buffers()]
        for path in self.state[layer].tensors:
            parent, _, name = path.rpartition(".")
            found.append(getattr(self.module.get_submodule(parent), name))
        return found

    def changed_buffers(self, layer: str) -> list[str]:
        """Return the buffers that a layer changes in training, but for batch normalisation's statistics."""
        found: list[str] = []
        for node in (self.recording.nodes[i] for i in self.members[layer]):
            if isinstance(node.target, str):
                for path, held in self.module.get_submodule(node.target).named_modules(prefix=node.target):
                    named = () if isinstance(held, _BatchNorm) else held.named_buffers(path, recurse=False)
                    found += [name for name, buffer in named if storage_id(buffer) in node.writes]
        return found

    def normalises(self, layer: str) -> bool:
        """Whether a layer holds a batch normalisation that trains."""
        return bool(self._normalisations(layer))

    def normalises_alone(self, layer: str) -> str:
        """Return why replicas cannot run a layer's batch normalisations together, or nothing."""
        for i in self.members[layer]:
            node = self.recording.nodes[i]
            if isinstance(node.target, str):
                if node.target in self.opaque and self.normalises(layer):
                    return f"a batch normalisation runs where {self.opaque[node.target]},"
            elif getattr(node.target, "__name__", "") == "batch_norm" and _trains(node):
                return "batch_norm is called as a function, not as nn.BatchNorm,"
        for part in self._normalisations(layer):
            if type(part).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
                return f"{type(part).__name__} has a forward of its own"
        return ""

    def _normalisations(self, layer: str) -> list[_BatchNorm]:
        held = [self.module.get_submodule(path) for path in self.state[layer].modules]
        parts = [part for module in held for part in module.modules()]
        return [part for part in parts if isinstance(part, _BatchNorm) and part.training]

    def flatten(self, example: Any) -> dict[Ref, Tensor]:
        """Return the tensors of a batch's input as the values that the first stage takes."""
        refs = self._input_refs
        tensors = tensors_of(list(example.values()) if isinstance(example, Mapping) else example)
        if len(tensors) != len(refs):
            raise InputError(
                f"the batch holds {len(tensors)} tensors, the model was traced with {len(refs)}; "
                "every batch must have the same structure"
            )
        return dict(zip(refs, tensors, strict=True))

    def unflatten(self, values: Mapping[Ref, Tensor], training: bool = True) -> Any:
        """Return the structure that the model returns (in evaluation: then), from the last stage's values."""
        evaluation = self.recording.evaluation_output
        output = self.recording.output if training or evaluation is None else evaluation
        ref_of = self._ref_of

        def fill(leaf: Any) -> Any:
            return values[ref_of[leaf]] if isinstance(leaf, Value) else leaf

        return map_tree(fill, output)

    def returned(self, training: bool = True) -> list[Ref]:
        """Return the values that the model returns (in evaluation: then), in their order."""
        evaluation = self.recording.evaluation_output
        output = self.recording.output if training or evaluation is None else evaluation
        return [self._ref_of[leaf] for leaf in tree_leaves(output) if isinstance(leaf, Value)]

    @cached_property
    def _input_refs(self) -> list[Ref]:
        inputs = [layer for layer in self.graph.layers if layer.kind == INPUT]
        return [Ref(layer.name, i) for layer in inputs for i in range(len(layer.outputs))]

    @cached_property
    def _ref_of(self) -> dict[Value, Ref]:
        return {value: ref for ref, value in self.value_of.items()}


@without_compiler()
def trace_model(
    config: ModelConfig, example: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> TracedModel:
    """Build a model without memory, run it once, and return its layer graph.

    Parameters
    ----------
    config
        Names the factory; ``leaves`` are patterns of submodules that stay one layer each.
    example
        One microbatch of the data set's input: a tensor; a tuple or list of the model's
        positional arguments; or a dictionary of its keyword arguments.  Only shapes and
        dtypes matter.  Floating tensors are taken as of ``dtype``.
    seed
        Seed of the weights and of everything random in the forward.
    dtype
        Type of floating parameters and buffers.

    Raises
    ------
    InputError
        When the factory fails, or the model cannot be followed: naming module, line and
        remedy.
    """
    factory = load_factory(config.factory)
    tape = Tape(seed)
    with tape.recording():
        try:
            module = factory(**config.args)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise InputError(f"[model] factory {config.factory!r} failed: {reason}") from error
        if not isinstance(module, nn.Module):
            kind = type(module).__name__
            raise InputError(f"[model] factory {config.factory!r} returned {kind}, not a torch module")
        cast(module, dtype)
    module.train()

    def as_trained(leaf: Any) -> Any:
        return leaf.to("meta", dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    arguments = map_tree(as_trained, arguments_of(module, example))
    opaque: dict[str, str] = {}
    recorder = _Records(module, tape, arguments, _leaf_rule(module, config.leaves, opaque))
    while True:
        try:
            recording, layers = recorder.run()
            break
        except CannotFollow as failure:
            if not recorder.exporting:
                recorder.exporting = True
                continue
            if not failure.path or failure.path in opaque:
                raise InputError(_remedy(failure, config)) from failure
            opaque[failure.path] = failure.reason
    return TracedModel(
        module=module, tape=tape, seed=seed, dtype=dtype, recording=recording, graph=layers.graph,
        members=layers.members, state=layers.state, value_of=layers.value_of,
        opaque={**opaque, **recording.run_for_real}, notes=tuple(recorder.notes),
    )  # fmt: skip


@dataclass
class _Records:
    """Records a model for two batch sizes, in training and in evaluation, as one recording.

    Models that look at values to save work (is there any padding?) often do not when they
    are exported; what cannot be followed is tried again ``exporting``.
    """

    module: nn.Module
    tape: Tape
    arguments: dict[str, Any]
    is_leaf: Callable[[str, nn.Module], bool]
    notes: list[str] = field(default_factory=list)
    exporting: bool = False

    def run(self) -> tuple[Recording, Layers]:
        """Record everything; raise `CannotFollow` when some module has to become a leaf."""
        self.notes.clear()
        training = self._in_mode(True)
        layers = layers_of(training, self.module)
        try:
            return self._with_evaluation(training, layers), layers
        except CannotFollow as failure:
            if failure.path:
                raise
            self.notes.append(f"evaluation runs as training does: {failure.reason}")
            return training, layers

    def _in_mode(self, training: bool) -> Recording:
        self.module.train(training)
        compiler: Any = torch.compiler
        flags = ("_is_exporting_flag", "_is_compiling_flag")
        before = {flag: getattr(compiler, flag, False) for flag in flags}
        try:
            for flag in flags:
                setattr(compiler, flag, self.exporting)
            return self._for_any_rows()
        finally:
            for flag, value in before.items():
                setattr(compiler, flag, value)
            self.module.train()

    def _for_any_rows(self) -> Recording:
        first = record(self.module, self.arguments, self.is_leaf, self.tape)
        rows = next((t.shape[0] for t in tensors_of(list(self.arguments.values())) if t.dim()), 0)

        def grown(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != rows:
                return leaf
            return torch.empty(rows + 1, *leaf.shape[1:], dtype=leaf.dtype, device="meta")

        if not rows:
            return first
        try:
            second = record(self.module, map_tree(grown, self.arguments), self.is_leaf, self.tape)
            return with_batch_size(first, second, (rows, rows + 1))
        except (CannotFollow, Differs) as failure:
            self.notes.append(f"only batches of {rows} rows run: {failure}")
            return first

    def _with_evaluation(self, training: Recording, layers: Layers) -> Recording:
        layer_of = {i: name for name, members in layers.members.items() for i in members}
        reads = {layer.name: {layers.value_of[ref] for ref in layer.inputs} for layer in layers.graph.layers}
        for name, members in layers.members.items():
            reads[name].update(v for i in members for v in training.nodes[i].makes)
        returned = {layers.value_of[ref] for ref in layers.graph.outputs}
        return with_evaluation(
            training,
            self._in_mode(False),
            lambda place, value: place not in layer_of or value in reads[layer_of[place]],
            returned,
        )


def arguments_of(module: nn.Module, example: Any) -> dict[str, Any]:
    """Return the model's arguments by name; positional ones start with ``*``."""
    if isinstance(example, Mapping):
        return {str(name): value for name, value in example.items()}
    positional = example if isinstance(example, (tuple, list)) else (example,)
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(*positional).arguments
    except TypeError as error:
        raise InputError(
            f"{type(module).__name__}.forward does not take the data set's input ({error}); "
            "a tuple is passed as positional arguments, a dictionary as keywords"
        ) from error
    named: dict[str, Any] = {}
    for name, value in bound.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            named.update({f"*{name}_{i}": item for i, item in enumerate(value)})
        else:
            named[f"*{name}"] = value
    return named


def _remedy(failure: CannotFollow, config: ModelConfig) -> str:
    where = f"module {failure.path!r}" if failure.path else "the model's own forward"
    return (
        f"cannot trace {where} of {config.factory}: {failure.reason}; move that code into a submodule, "
        'which is then one layer by itself, or name one that holds it: [model] leaves = ["path.*"]'
    )


def _leaf_rule(
    root: nn.Module, patterns: Sequence[str], opaque: Mapping[str, str]
) -> Callable[[str, nn.Module], bool]:
    """Return the rule that tells which submodules are one layer each.

    These are the layers of ``torch.nn``; those that ``patterns`` name; those in ``opaque``;
    and, when the model itself is an `nn.Sequential`, whatever the user put in it.
    """

    def is_leaf(path: str, module: nn.Module) -> bool:
        if not path:
            return False
        if path in opaque or any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns):
            return True
        if isinstance(module, _CONTAINERS):
            return False
        if type(module).__module__.startswith("torch.nn."):
            return True
        parents = [root.get_submodule(path.rsplit(".", n)[0]) for n in range(1, path.count(".") + 1)]
        return isinstance(root, nn.Sequential) and all(isinstance(p, nn.Sequential) for p in parents)

    paths = [path for path, _ in root.named_modules()]
    unmatched = [p for p in patterns if not fnmatch.filter(paths, p)]
    InputError.collect(f"[model] leaves = [{p!r}] matches no submodule of the model" for p in unmatched)
    return is_leaf


def _trains(batch_norm: Node) -> bool:
    """Whether a recorded call of batch_norm normalises by the batch's statistics."""
    given = batch_norm.args[5:6] or (batch_norm.kwargs.get("training", False),)
    return bool(given[0])
