"""From a traced model to one stage's module with real weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from pdmpi.errors import InputError, nearest
from pdmpi.model.compiled import compiled
from pdmpi.model.materialise import Materialiser
from pdmpi.model.stage import StageModule
from pdmpi.model.steps import Steps

if TYPE_CHECKING:
    from pdmpi.model.trace import TracedModel

__all__ = ["build_model", "build_stage"]


def build_stage(
    traced: TracedModel,
    layers: Iterable[str],
    *,
    seed: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    last: bool | None = None,
    compiles: bool = False,
) -> StageModule:
    """Return a module that runs some layers, with real weights for these alone.

    Parameters
    ----------
    traced
        The whole model without memory.
    layers
        Names of the stage's layers, in any order.
    seed
        Seed of dropout masks; the trace's own by default.  (Weights follow the seed of the trace.)
    dtype
        Type of parameters; the trace's own by default.
    device
        Where parameters live.
    last
        Whether this is the last stage, whose outputs are the model's; by default whether
        it holds the last layer.
    compiles
        Whether training goes through torch's compiler.

    Raises
    ------
    InputError
        For a layer that the model does not have.
    """
    chosen = set(layers)
    InputError.collect(
        f"stage names layer {name!r}, which the model does not have{nearest(name, traced.graph.index)}"
        for name in sorted(chosen - set(traced.graph.index))
    )
    graph = traced.graph
    is_last = graph.layers[-1].name in chosen if last is None else last
    order = [layer.name for layer in graph.layers if layer.name in chosen]
    stage = StageModule()
    real = Materialiser(traced.module, traced.tape, torch.device(device))
    owned = [traced.state[name] for name in order]
    real.modules(stage, dict.fromkeys(path for state in owned for path in state.modules))
    real.tensors(stage, dict.fromkeys(path for state in owned for path in state.tensors))
    if dtype is not None and dtype != traced.dtype:
        stage.to(dtype)
    steps = Steps.compile(
        traced,
        order,
        is_last=is_last,
        seed=traced.seed if seed is None else seed,
        device=torch.device(device),
        modules=real.module_of,
        tensors=real.owner_of,
        constant=real.real,
    )
    if compiles:
        steps = compiled(steps)
    stage.adopt(steps, [name for layer in order for name in traced.changed_buffers(layer)])
    return stage.train()


def build_model(traced: TracedModel, device: torch.device | str = "cpu") -> nn.Module:
    """Return the user's own module, whole, with the weights that its stages have."""
    real = Materialiser(traced.module, traced.tape, torch.device(device))
    return real.whole().train()
