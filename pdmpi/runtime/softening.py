"""What softens stale weights: a smaller step while a run warms up, and forwards at predicted weights.

A stage with lag L (`pdmpi.schedule.staleness`) steps w[t+1] = w[t] - lr[t] g(w[t-L]).

Warm-up.  lr[t] = lr / (L + 1)^(1 - min(t / K, 1)) over the first K updates of a run: PipeMare's first
technique (Yang et al., MLSys 2021, arXiv:1910.05124, section 3.1, "learning rate rescheduling").
PipeMare divides by its delay in slots; L + 1 leaves a stage without lag alone.

Prediction.  A forward that reads version t for an update that reads version t + s uses
w[t] - s lr v, where lr v, with v the momentum buffer, is what SGD with momentum subtracts in
one step: SpecTrain (Chen, Yang and Cheng, 2018, arXiv:1809.02839, equation 4).  SpecTrain predicts
anew for the backward; here the backward, and a recomputation, use the very weights of the forward,
as weight stashing wants.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdmpi.runtime.weights import WeightRing

__all__ = ["Softening"]


class Softening:
    """Chooses the weights of each microbatch and the learning rate of each update of one stage.

    Parameters
    ----------
    ring
        The stage's weight versions, with their optimizer.
    lag
        The stage's version lag in the steady state.
    microbatches_per_update
        Over all replicas.
    warmup
        Updates over which the learning rate rises; 0 for none.
    predicts
        Whether forwards use predicted weights.
    """

    def __init__(
        self, ring: WeightRing, *, lag: int, microbatches_per_update: int, warmup: int, predicts: bool
    ) -> None:
        self._ring = ring
        self._lag = lag
        self._per_update = microbatches_per_update
        self._warmup = warmup
        self._predicts = predicts and ring.optimizer is not None
        self._rates = [float(group["lr"]) for group in ring.optimizer.param_groups] if ring.optimizer else []
        self._updates = 0
        self._predicted: dict[int, list[Tensor]] = {}
        self._free: list[list[Tensor]] = []

    def begin(self, first: int) -> None:
        """Start a program after ``first`` microbatches of the run, so that a resumed run goes on alike."""
        assert not self._predicted, "a program ends drained"
        self._updates = first // self._per_update

    def forward(self, k: int, version: int, slot: int) -> None:
        """Make the stage read microbatch ``k``'s weights: a version, or what it will have become."""
        steps = k // self._per_update - version
        velocity = self._velocity() if self._predicts and steps else []
        if not velocity:
            self._ring.select(slot)
            return
        held = self._free.pop() if self._free else [torch.empty_like(v) for v in self._ring.version(slot)]
        with torch.no_grad():
            for target, value, (moved, rate) in zip(held, self._ring.version(slot), velocity, strict=True):
                target.copy_(value)
                if moved is not None:
                    target.sub_(moved, alpha=steps * rate * self._factor())
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

    def step(self) -> None:
        """Set the learning rate of the update that follows."""
        if self._warmup and self._ring.optimizer is not None:
            for group, rate in zip(self._ring.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * self._factor()
        self._updates += 1

    def _factor(self) -> float:
        """Return what the next update's learning rate is multiplied by."""
        if not self._warmup:
            return 1.0
        return float((self._lag + 1) ** (min(self._updates / self._warmup, 1.0) - 1.0))

    def _velocity(self) -> list[tuple[Tensor | None, float]]:
        """Return each parameter's momentum buffer and learning rate; nothing before the first update."""
        optimizer = self._ring.optimizer
        assert optimizer is not None
        found = {
            parameter: (optimizer.state.get(parameter, {}).get("momentum_buffer"), rate)
            for group, rate in zip(optimizer.param_groups, self._rates, strict=True)
            for parameter in group["params"]
        }
        velocity = [found[master] for master in self._ring.masters.values()]
        return velocity if any(moved is not None for moved, _ in velocity) else []
