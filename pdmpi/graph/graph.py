"""The layer graph: what the planner cuts and the runtime slices.

A graph is a list of layers in execution order.  Every value is named by the layer that
produces it and the index of its output (`Ref`).  A model's inputs are layers of kind
``"Input"``: they cost nothing and belong to the first stage.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

from pdmpi.errors import InputError

__all__ = ["DTYPE_BYTES", "INPUT", "Layer", "LayerGraph", "Ref", "TensorSpec"]

INPUT = "Input"
"""The kind of a layer that stands for an input of the model."""

DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes of one element, by the dtype's name in torch."""


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """One value: output ``output`` of the layer named ``layer``."""

    layer: str
    output: int = 0

    def __str__(self) -> str:
        return f"{self.layer}:{self.output}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape (of one microbatch, dimension 0 the batch), dtype, and whether a gradient flows back."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    requires_grad: bool = True

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer that a person recognises, usually a submodule.

    Attributes
    ----------
    name
        Unique in the graph; the module's path in the model (``"features.3"``) or the
        name of a functional operator (``"add_2"``).
    kind
        The module's class or the operator, ``"Conv2d"``, ``"add"``.
    inputs
        The values it reads, in the order of its arguments.
    outputs
        One spec for each tensor it returns.
    parameters
        Names, as in the model's ``state_dict``, of the parameters that it reads.  A name
        read by two layers is one tensor (see `LayerGraph.ties` for two names, one tensor).
    trainable
        Whether any of its parameters is trained.
    """

    name: str
    kind: str
    inputs: tuple[Ref, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    parameters: tuple[str, ...] = ()
    trainable: bool = True


@dataclass(frozen=True)
class LayerGraph:
    """Layers in execution order, the values the model returns, and tied parameters.

    Attributes
    ----------
    layers
        Every layer reads only values of layers before it.
    outputs
        The values that the model returns, in order.
    ties
        Groups of parameter names that are one tensor.
    """

    layers: tuple[Layer, ...]
    outputs: tuple[Ref, ...]
    ties: tuple[tuple[str, ...], ...] = field(default=())

    def __post_init__(self) -> None:
        seen: dict[str, Layer] = {}
        problems = []
        for layer in self.layers:
            for ref in layer.inputs:
                if ref.layer not in seen:
                    problems.append(f"layer {layer.name!r} reads {ref}, which no layer before it makes")
                elif not 0 <= ref.output < len(seen[ref.layer].outputs):
                    problems.append(f"layer {layer.name!r} reads {ref}, which {ref.layer!r} does not return")
            if layer.name in seen:
                problems.append(f"two layers are named {layer.name!r}")
            seen[layer.name] = layer
        missing = [ref for ref in self.outputs if ref.layer not in seen]
        problems += [f"the model returns {ref}, which no layer makes" for ref in missing]
        InputError.collect(problems)

    def __len__(self) -> int:
        return len(self.layers)

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each layer in the execution order, by name."""
        return {layer.name: i for i, layer in enumerate(self.layers)}

    @cached_property
    def consumers(self) -> dict[Ref, tuple[str, ...]]:
        """The layers that read each value, in execution order."""
        found: dict[Ref, list[str]] = {}
        for layer in self.layers:
            for ref in dict.fromkeys(layer.inputs):
                found.setdefault(ref, []).append(layer.name)
        return {ref: tuple(names) for ref, names in found.items()}

    @cached_property
    def trained(self) -> tuple[bool, ...]:
        """For each layer, whether any of its parameters is trained."""
        return tuple(layer.trainable and bool(layer.parameters) for layer in self.layers)

    @cached_property
    def depends(self) -> tuple[bool, ...]:
        """For each layer, whether what it returns depends on a trained parameter."""
        found: list[bool] = []
        for layer, own in zip(self.layers, self.trained, strict=True):
            found.append(own or any(found[self.index[ref.layer]] for ref in layer.inputs))
        return tuple(found)

    def returns_gradient(self, ref: Ref) -> bool:
        """Whether a gradient flows back over a value."""
        return self.spec(ref).requires_grad and self.depends[self.index[ref.layer]]

    def gradient_bytes_over(self, name: str) -> int:
        """Return the bytes of the gradients that have arrived, and wait, when a layer runs backward.

        They are those of values that the layer or one before it makes and a later one, or the loss, reads:
        its own outputs', and those that skip over it.
        """
        at = self.index[name]
        read_later = {ref for layer in self.layers[at + 1 :] for ref in layer.inputs} | set(self.outputs)
        return sum(
            self.spec(ref).nbytes
            for ref in read_later
            if self.index[ref.layer] <= at and self.returns_gradient(ref)
        )

    def spec(self, ref: Ref) -> TensorSpec:
        """Return the shape and dtype of one value."""
        return self.layers[self.index[ref.layer]].outputs[ref.output]

    def crossing(self, stages: Sequence[Iterable[str]]) -> dict[tuple[int, int], tuple[Ref, ...]]:
        """Return, for each pair of stages (source, target), the values sent straight from one to the other.

        Parameters
        ----------
        stages
            The layer names of each stage; every layer in exactly one.

        Returns
        -------
        dict
            Keys in ascending order, values in the order their layers run.  A model's
            input that a later stage reads does cross, from the stage of its ``"Input"``
            layer; a value that the model returns is read by the last stage.
        """
        stage_of = {name: s for s, names in enumerate(stages) for name in names}
        found: dict[tuple[int, int], dict[Ref, None]] = {}
        reads = [(stage_of[layer.name], layer.inputs) for layer in self.layers]
        for target, refs in [*reads, (len(stages) - 1, self.outputs)]:
            for ref in refs:
                source = stage_of[ref.layer]
                if source != target:
                    found.setdefault((source, target), {})[ref] = None
        order = self.index
        return {
            pair: tuple(sorted(values, key=lambda r: (order[r.layer], r.output)))
            for pair, values in sorted(found.items())
        }

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the structure, the batch dimension left out; equal fingerprints take the same plan."""
        data = asdict(self)
        for layer in data["layers"]:
            for spec in layer["outputs"]:
                spec["shape"] = spec["shape"][1:]
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
