"""Stages run one after the other, as an executor would, against the model in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pdmpi.graph import Ref
from pdmpi.model.build import build_stage
from pdmpi.model.stage import StageModule
from pdmpi.model.trace import TracedModel
from pdmpi.model.tree import tensors_of


def total(output: Any) -> Tensor:
    """A loss of every floating tensor that a model returns."""
    terms = [(t.double() * torch.linspace(-1, 2, t.numel(), dtype=torch.float64).view(t.shape)).sum()
             for t in tensors_of(output) if t.is_floating_point()]  # fmt: skip
    return torch.stack(terms).sum()


def cut(traced: TracedModel, cuts: Sequence[int]) -> list[list[str]]:
    """Layer names of contiguous stages that end before these positions."""
    names = [layer.name for layer in traced.graph.layers]
    edges = [0, *sorted(cuts), len(names)]
    return [names[a:b] for a, b in pairwise(edges) if a < b]


class Chain:
    """Stages with real weights, and one forward and backward through them."""

    def __init__(self, traced: TracedModel, stages: Sequence[Sequence[str]]) -> None:
        self.traced = traced
        self.crossing = traced.graph.crossing(stages)
        self.stages: list[StageModule] = [
            build_stage(traced, names, last=i == len(stages) - 1) for i, names in enumerate(stages)
        ]

    def step(self, batch: Any, microbatch: int = 0, recompute: bool = False) -> tuple[Tensor, Any]:
        """Return (loss, output) after a forward and a backward; gradients accumulate."""
        values: dict[Ref, Tensor] = self.traced.flatten(batch)
        runs = []
        for stage in self.stages:
            slots = {ref: values[ref] for ref in stage.inputs}
            before = {ref: t.clone() for ref, t in slots.items()}
            inputs = {ref: t.detach().requires_grad_(self._needs(ref)) for ref, t in slots.items()}
            if recompute:
                with torch.no_grad():
                    stage(inputs, microbatch)
            outputs = stage(inputs, microbatch, recompute=recompute)
            assert all(t.is_contiguous() for t in outputs.values())
            for ref, tensor in before.items():
                assert torch.equal(slots[ref], tensor), f"{ref} was written to"
            for ref, tensor in outputs.items():
                spec = self.traced.graph.spec(ref)
                assert (tuple(tensor.shape), str(tensor.dtype)) == (spec.shape, f"torch.{spec.dtype}")
                assert tensor.requires_grad == spec.requires_grad, ref
                values[ref] = tensor.detach().clone()
            runs.append((inputs, outputs))
        refs = self.stages[-1].outputs
        results = {ref: runs[-1][1][ref].detach().requires_grad_(self._needs(ref)) for ref in refs}
        loss = total(self.traced.unflatten(results))
        loss.backward()
        grads = {ref: t.grad for ref, t in results.items()}
        for inputs, outputs in reversed(runs):
            # A value that only passes through is among the inputs too: its gradient comes back there.
            wanted = [(t, grads.pop(ref, None)) for ref, t in outputs.items() if t.requires_grad]
            pairs = [(t, g) for t, g in wanted if g is not None]
            if pairs:
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            for ref, tensor in inputs.items():
                if tensor.grad is not None:
                    grads[ref] = tensor.grad + grads[ref] if ref in grads else tensor.grad
        return loss, self.traced.unflatten({ref: runs[-1][1][ref] for ref in refs})

    def _needs(self, ref: Ref) -> bool:
        return self.traced.graph.spec(ref).requires_grad

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by name, those of one parameter in several stages (or under two names) summed."""
        names = {id(p): n for n, p in self.traced.module.named_parameters()}
        first = {n: names[id(p)] for n, p in self.traced.module.named_parameters(remove_duplicate=False)}
        found: dict[str, Tensor] = {}
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                if parameter.grad is not None:
                    key = first[name]
                    found[key] = found[key] + parameter.grad if key in found else parameter.grad
        return found

    def buffers(self) -> dict[str, Tensor]:
        """Buffers by name."""
        return {name: b for stage in self.stages for name, b in stage.named_buffers(remove_duplicate=False)}

    def names(self) -> list[str]:
        """Names of the stages' state dictionaries, one after the other."""
        return [name for stage in self.stages for name in stage.state_dict()]
