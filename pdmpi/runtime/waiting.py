"""Gradients that wait for more microbatches of their update: in one place, launched or replayed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pdmpi.runtime.weights import flat_views

__all__ = ["WaitingGradients"]

_SMALL_BYTES = 1 << 20
"""Gradients up to so large are added all at once: one by one a launch takes longer than its sum."""


class WaitingGradients:
    """The gradients of a stage's parameters, in one piece at fixed addresses.

    In many pieces they would lie in gaps between activations, and hold the memory around them.

    Parameters
    ----------
    parameters
        Of the stage.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._places: dict[nn.Parameter, Tensor] = {}

    def reserve(self) -> None:
        """Allocate the memory, if that has not been done."""
        if not self._places:
            self._places = dict(zip(self._parameters, flat_views(self._parameters)[1], strict=True))

    def release(self) -> None:
        """Give the memory back, as soon as no parameter's gradient lies there."""
        self._places = {}

    def forget(self) -> None:
        """Let the gradients of the next update start from nothing."""
        for parameter in self._parameters:
            parameter.grad = None

    @contextmanager
    def collected(self, *, opens: bool) -> Iterator[None]:
        """Let gradients of a backward that is launched be moved here, each as soon as it is there.

        Sparse ones stay where they are.  ``opens`` says that nothing lies here yet.
        """
        self.reserve()
        if opens:
            self._zero()
        handles = [p.register_post_accumulate_grad_hook(self._move) for p in self._parameters]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def expect(self, trained: Collection[nn.Parameter], *, opens: bool, at_once: bool) -> None:
        """Let the backward that follows add to the gradients here.

        Parameters
        ----------
        trained
            Parameters that get a gradient.
        opens
            Whether it is the first of its update.
        at_once
            Whether `add` follows it, with those that are small.
        """
        self.reserve()
        if opens:
            self._zero()
        for parameter, place in self._places.items():
            here = parameter in trained and not (at_once and place.nbytes <= _SMALL_BYTES)
            parameter.grad = place if here else None

    def add(self) -> bool:
        """Add the small gradients; say whether all that there are now lie here."""
        small = {p: p.grad for p in self._parameters if p.nbytes <= _SMALL_BYTES and p.grad is not None}
        if small:
            with torch.no_grad():
                torch._foreach_add_([self._places[p] for p in small], list(small.values()))
        for parameter in small:
            parameter.grad = self._places[parameter]
        return all(p.grad is None or p.grad is self._places[p] for p in self._parameters)

    def _zero(self) -> None:
        if self._places:
            torch._foreach_zero_(list(self._places.values()))

    def _move(self, parameter: Tensor) -> None:
        made = parameter.grad
        assert isinstance(parameter, nn.Parameter)
        place = self._places[parameter]
        if made is not None and made is not place and made.layout == torch.strided:
            with torch.no_grad():
                place.copy_(made)
            parameter.grad = place
