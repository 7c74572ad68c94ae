"""Forwards and backwards of one stage as CUDA graphs: captured once a slot, replayed ever after.

Launching a stage's kernels one by one from Python takes longer than many of them run; a
replay launches all at once (DESIGN, fact 16).  What a graph reads and writes lies at fixed
addresses: weights in their ring's slots, inputs and gradients in tensors of the graph's
own, which are filled from the boundary's regions just before a replay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pdmpi.graph import Ref
from pdmpi.model.tree import map_tree, tensors_of
from pdmpi.runtime.feed import Batch
from pdmpi.runtime.run import StageRun

__all__ = ["GraphedRun", "StageGraphs"]

_EAGER_VISITS = 2
"""Runs of a pair of slots before it is captured: libraries set themselves up in the first."""

Forward = Callable[[Mapping[Ref, Tensor], Batch, int], StageRun]
"""Runs a stage forward, keeping what the backward needs."""


@dataclass(kw_only=True)
class GraphedRun(StageRun):
    """A forward that was captured, and its backward."""

    parameters: Sequence[nn.Parameter]
    fed: Batch
    forward_graph: torch.cuda.CUDAGraph
    pool: Any
    backward_graph: torch.cuda.CUDAGraph | None = None
    arriving: list[Tensor] = field(default_factory=list)
    parameter_gradients: list[Tensor | None] = field(default_factory=list)
    leaf_gradients: list[Tensor | None] = field(default_factory=list)

    def refill(self, leaves: Mapping[Ref, Tensor], fed: Batch) -> None:
        """Copy a microbatch's values to where the graph reads them (`data`: autograd counts no change)."""
        for ref, leaf in self.leaves.items():
            leaf.data.copy_(leaves[ref].data)
        for ref, value in self.fed.inputs.items():
            value.data.copy_(fed.inputs[ref])
        for held, target in zip(tensors_of(self.fed.target), tensors_of(fed.target), strict=True):
            held.data.copy_(target)

    def backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Do what ``torch.autograd.backward`` does, by a replay."""
        before = [parameter.grad for parameter in self.parameters]
        if self.backward_graph is None:
            self._capture(roots, gradients)
        assert self.backward_graph is not None
        for held, gradient in zip(self.arriving, (g for g in gradients if g is not None), strict=True):
            held.data.copy_(gradient)
        self.backward_graph.replay()
        for leaf, found in zip(self.leaves.values(), self.leaf_gradients, strict=True):
            leaf.grad = found
        earlier: list[Tensor] = []
        added: list[Tensor] = []
        for parameter, old, new in zip(self.parameters, before, self.parameter_gradients, strict=True):
            parameter.grad = new if old is None else old
            if old is not None and new is not None:
                earlier.append(old)
                added.append(new)
        if added:
            torch._foreach_add_(earlier, added)

    def keep_gradients(self) -> None:
        """Take copies of the parameters' gradients, which the next replay would overwrite."""
        own = {id(gradient) for gradient in self.parameter_gradients}
        for parameter in self.parameters:
            if parameter.grad is not None and id(parameter.grad) in own:
                parameter.grad = parameter.grad.clone()

    def _capture(self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        for tensor in (*self.parameters, *self.leaves.values()):
            tensor.grad = None
        held = [None if gradient is None else gradient.clone() for gradient in gradients]
        self.arriving = [gradient for gradient in held if gradient is not None]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            torch.autograd.backward(list(roots), held, retain_graph=True)
        self.backward_graph = graph
        self.parameter_gradients = [parameter.grad for parameter in self.parameters]
        self.leaf_gradients = [leaf.grad for leaf in self.leaves.values()]


class StageGraphs:
    """The graphs of one stage, by the slots of weights and of saved activations.

    Parameters
    ----------
    parameters
        Trainable parameters of the stage.
    forward
        Runs it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], forward: Forward) -> None:
        self._parameters = parameters
        self._forward = forward
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._captured: dict[tuple[int, int], GraphedRun] = {}
        self._visits: Counter[tuple[int, int]] = Counter()
        self.refusal = ""
        """Why the stage runs eagerly after all."""

    def begin(self) -> None:
        """Start a program: pairs of slots that only its start visits are not worth a graph."""
        self._visits.clear()

    def forward(
        self, weights: int, saved: int, leaves: Mapping[Ref, Tensor], fed: Batch, microbatch: int
    ) -> GraphedRun | None:
        """Run a microbatch forward by a replay; None where it has to run eagerly."""
        key = (weights, saved)
        self._visits[key] += 1
        if self.refusal or (key not in self._captured and self._visits[key] <= _EAGER_VISITS):
            return None
        if key not in self._captured:
            try:
                self._captured[key] = self._capture(leaves, fed, microbatch)
            except RuntimeError as error:
                self.refusal = str(error).splitlines()[0]
                torch.cuda.synchronize()
                return None
        run = self._captured[key]
        run.refill(leaves, fed)
        run.forward_graph.replay()
        return run

    def _capture(self, leaves: Mapping[Ref, Tensor], fed: Batch, microbatch: int) -> GraphedRun:
        own = {
            ref: leaf.detach().clone().requires_grad_(leaf.requires_grad) for ref, leaf in leaves.items()
        }
        inputs = {ref: value.clone() for ref, value in fed.inputs.items()}
        target = map_tree(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, fed.target)
        held = Batch(inputs, target)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run = self._forward(own, held, microbatch)
        return GraphedRun(
            leaves=run.leaves, outputs=run.outputs, loss=run.loss,
            parameters=self._parameters, fed=held, forward_graph=graph, pool=self._pool,
        )  # fmt: skip
