"""Forwards at predicted weights, which soften their staleness.

A forward that reads version t for an update that reads version t + s uses w[t] - s lr v, where lr v,
with v the momentum buffer and lr the next update's rate, is what SGD with momentum subtracts in one step
(where rates change from one to the next, s times it is near to that): SpecTrain (Chen, Yang and
Cheng, 2018, arXiv:1809.02839, equation 4).  SpecTrain predicts anew for the backward; here the
backward, and a recomputation, use the very weights of the forward, as weight stashing wants.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdmpi.runtime.rates import Rates
from pdmpi.runtime.weights import WeightRing

__all__ = ["WeightPrediction"]


class WeightPrediction:
    """Chooses the weights of each microbatch of one stage.

    Parameters
    ----------
    ring
        The stage's weight versions, with their optimizer.
    rates
        Of its updates.
    microbatches_per_update
        Over all replicas.
    """

    def __init__(self, ring: WeightRing, rates: Rates, *, microbatches_per_update: int) -> None:
        self._ring = ring
        self._rates = rates
        self._per_update = microbatches_per_update
        self._predicted: dict[int, list[Tensor]] = {}
        self._free: list[list[Tensor]] = []

    def forward(self, k: int, version: int, slot: int) -> None:
        """Make the stage read microbatch ``k``'s weights: a version, or what it will have become."""
        steps = k // self._per_update - version
        velocity = self._velocity() if steps else []
        if not velocity:
            self._ring.select(slot)
            return
        held = self._free.pop() if self._free else [torch.empty_like(v) for v in self._ring.version(slot)]
        with torch.no_grad():
            for target, value, (moved, rate) in zip(held, self._ring.version(slot), velocity, strict=True):
                target.copy_(value)
                if moved is not None:
                    target.sub_(moved, alpha=steps * rate)
        self._predicted[k] = held
        self._ring.read(held)

    def again(self, k: int, slot: int) -> None:
        """Make the stage read the weights of ``k``'s forward once more."""
        if k in self._predicted:
            self._ring.read(self._predicted[k])
        else:
            self._ring.select(slot)

    def finish(self, k: int) -> None:
        """Forget the weights of a microbatch whose backward is done."""
        if k in self._predicted:
            self._free.append(self._predicted.pop(k))

    def _velocity(self) -> list[tuple[Tensor | None, float]]:
        """Return each parameter's momentum buffer and learning rate; nothing before the first update."""
        optimizer = self._ring.optimizer
        if optimizer is None:
            return []
        found = {
            parameter: (optimizer.state.get(parameter, {}).get("momentum_buffer"), rate)
            for group, rate in zip(optimizer.param_groups, self._rates.next(), strict=True)
            for parameter in group["params"]
        }
        velocity = [found[master] for master in self._ring.masters.values()]
        return velocity if any(moved is not None for moved, _ in velocity) else []
