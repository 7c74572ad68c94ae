"""Costs of layers that train through torch's compiler: timed one by one, then as the compiled call of all.

The compiler fuses layers that lie in one stage, so what a layer costs by itself is not what it costs in
training.  A run of layers is measured compiled, as a stage of them would be, and each layer's part of its
time and memory is what the layer's part is uncompiled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pdmpi.plan.profile import LayerCost

__all__ = ["shared_out"]


def shared_out(costs: Sequence[LayerCost], whole: LayerCost) -> list[LayerCost]:
    """Return the costs of consecutive layers, in proportion, such that they sum to those of the whole.

    Of what is not a sum, workspaces, each layer has the whole's: a stage's is the largest of its layers'.

    Parameters
    ----------
    costs
        Of each layer by itself.
    whole
        Of all of them as one compiled call.
    """
    forward = _ratio(whole.forward_s, [cost.forward_s for cost in costs])
    backward = _ratio(whole.backward_s, [cost.backward_s for cost in costs])
    saved = _ratio(whole.saved_bytes, [cost.saved_bytes for cost in costs])
    return [
        replace(
            cost,
            forward_s=cost.forward_s * forward,
            backward_s=cost.backward_s * backward,
            saved_bytes=round(cost.saved_bytes * saved),
            workspace_bytes=whole.workspace_bytes,
            forward_workspace_bytes=whole.forward_workspace_bytes,
        )
        for cost in costs
    ]


def _ratio(whole: float, parts: Sequence[float]) -> float:
    total = math.fsum(parts)
    return whole / total if total else 1.0
