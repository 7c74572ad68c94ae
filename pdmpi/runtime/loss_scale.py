"""The loss scale of float16: one number that every rank knows, so that small gradients do not vanish.

The loss is multiplied before the backward, gradients are divided in float32 before the
step.  A gradient that overflows anywhere makes every stage leave the minibatch out, and halves
the scale; it doubles after many updates without one (Micikevicius et al., ICLR 2018, arXiv:1710.03740,
section 3.2; the numbers are those of ``torch.amp.GradScaler``).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["LossScale"]

_FIRST = 2.0**16
_LEAST = 2.0**-24
_UPDATES_TO_GROW = 2000


class LossScale:
    """A dynamic loss scale; ranks that are told the same hold the same.

    Attributes
    ----------
    value
        The factor on the loss: a power of two.
    skipped
        Updates that were left out, since this rank started.
    """

    def __init__(self) -> None:
        self.value = _FIRST
        self.skipped = 0
        self._good = 0

    def learn(self, overflowed: bool) -> None:
        """Take in whether the gradients of an update overflowed."""
        if overflowed:
            self.value = max(self.value / 2, _LEAST)
            self.skipped += 1
            self._good = 0
            return
        self._good += 1
        if self._good == _UPDATES_TO_GROW:
            self.value *= 2
            self._good = 0

    @property
    def state(self) -> tuple[float, int]:
        """What a checkpoint keeps: the scale, and updates since it changed."""
        return self.value, self._good

    @state.setter
    def state(self, kept: Sequence[float]) -> None:
        self.value, self._good = float(kept[0]), int(kept[1])
