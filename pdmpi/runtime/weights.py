"""Weight versions of one stage: a ring of slots at fixed addresses, and the optimizer that fills it.

A forward leaves its parameters inside the autograd graph, and the backward reads whatever
data the parameter object holds then; so the version that the forward used is put back
before its backward (DESIGN, fact 4).  The optimizer never touches the module's own
parameters: it owns a second set of parameter objects over the same slots, whose version
counters autograd does not watch.

In 16 bits the optimizer steps one set of float32 masters, and what is versioned is their
rounded copy: half the memory of a version, and no update too small to count.  (What a stage
has in other types beside them keeps its type.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from pdmpi.model.precision import is_sixteen_bits
from pdmpi.runtime.fused_step import fused_step

__all__ = ["WeightRing", "flat_views"]

_ALIGNMENT_BYTES = 64


def _master(view: Tensor) -> Tensor:
    """Return what the optimizer steps where versions are rounded: float32 for 16 bits, else a copy."""
    return view.float() if is_sixteen_bits(view.dtype) else view.clone()


def _is_sparse(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout != torch.strided


def flat_views(like: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Allocate one flat buffer a dtype and return them with one view a tensor, in order."""
    offsets: list[int] = []
    sizes: dict[torch.dtype, int] = {}
    for tensor in like:
        step = max(1, _ALIGNMENT_BYTES // tensor.element_size())
        offsets.append(sizes.get(tensor.dtype, 0))
        sizes[tensor.dtype] = offsets[-1] + -(-tensor.numel() // step) * step
    device = like[0].device if like else torch.device("cpu")
    flats = {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in sizes.items()}
    views = [
        flats[tensor.dtype][offset : offset + tensor.numel()].view(tensor.shape)
        for tensor, offset in zip(like, offsets, strict=True)
    ]
    return list(flats.values()), views


class WeightRing:
    """Slots for the versions of a stage's trainable parameters.

    Parameters
    ----------
    parameters
        The module's trainable parameters by name.  They are re-pointed at the slots; slot 0
        receives their present values.
    num_slots
        Versions that can be alive at once: the stage's in-flight depth.
    make_optimizer
        Builds the optimizer over the ring's own parameter objects, by name.
    fuses
        Whether updates may be made by one kernel, where there is one: nothing looks at the
        gradients or the optimizer's state between `gather` and `step`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        num_slots: int,
        make_optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer | None],
        *,
        fuses: bool = True,
    ) -> None:
        self.parameters = dict(parameters)
        self._own = list(self.parameters.values())
        self._flats: list[list[Tensor]] = []
        self._views: list[list[Tensor]] = []
        for _ in range(num_slots):
            flats, views = flat_views(self._own)
            self._flats.append(flats)
            self._views.append(views)
        with torch.no_grad():
            for view, parameter in zip(self._views[0], self._own, strict=True):
                view.copy_(parameter)
        self._rounds = any(is_sixteen_bits(p.dtype) for p in self._own)
        held = [_master(view) for view in self._views[0]] if self._rounds else self._views[0]
        self._masters = {name: nn.Parameter(v) for name, v in zip(parameters, held, strict=True)}
        self.optimizer = make_optimizer(self._masters)
        self._fused = fused_step(self.optimizer, self._own) if fuses else None
        self._selected = -1
        self._newest = 0
        self.select(0)

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return len(self._views)

    @property
    def newest(self) -> int:
        """The slot of the newest version."""
        return self._newest

    @property
    def masters(self) -> Mapping[str, nn.Parameter]:
        """The newest version of each parameter, as the optimizer knows it."""
        return self._masters

    def select(self, slot: int) -> None:
        """Make the module's parameters read the version in ``slot``."""
        if slot != self._selected:
            for parameter, view in zip(self._own, self._views[slot], strict=True):
                parameter.data = view
            self._selected = slot

    def version(self, slot: int) -> Sequence[Tensor]:
        """Return the version in ``slot``, in the order of `parameters`."""
        return self._views[slot]

    def read(self, values: Sequence[Tensor]) -> None:
        """Make the module's parameters read values that are in no slot."""
        for parameter, value in zip(self._own, values, strict=True):
            parameter.data = value
        self._selected = -1

    def update(self, read: int, write: int, scale: float) -> None:
        """Step from the version in ``read`` to ``write`` with the gradients times ``scale``; clear them."""
        if self._fused is None or any(_is_sparse(p.grad) for p in self._own):
            self.gather(scale)
            self.step(read, write)
            return
        pairs = list(zip(self._own, self._masters.values(), strict=True))
        gradients = {master: own.grad for own, master in pairs if own.grad is not None}
        versions = {master: view for (_, master), view in zip(pairs, self._views[write], strict=True)}
        self._fused(gradients, versions, scale)
        for own in self._own:
            own.grad = None
        self._newest = write

    def gather(self, scale: float) -> list[Tensor]:
        """Hand the gradients times ``scale`` to the optimizer, clear the module's, and return them."""
        gradients = []
        for parameter, master in zip(self._own, self._masters.values(), strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            parameter.grad = None
            if self._rounds:
                gradient = gradient.to(master.dtype)
            master.grad = gradient
            gradients.append(gradient)
        if scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, scale)
        return gradients

    def step(self, read: int, write: int, *, factor: Tensor | None = None, applies: bool = True) -> None:
        """Step with the gathered gradients times a factor, and clear them.

        An update that does not apply only moves the version.
        """
        gradients = [m.grad for m in self._masters.values() if m.grad is not None]
        if factor is not None and gradients:
            torch._foreach_mul_(gradients, factor)
        if not self._rounds:
            self._move(read, write)
        if self.optimizer is not None and applies:
            self.optimizer.step()
        if self._rounds:
            with torch.no_grad():
                torch._foreach_copy_(self._views[write], list(self._masters.values()))
            self._newest = write
        for master in self._masters.values():
            master.grad = None

    def rewind(self) -> None:
        """Bring the newest version to slot 0, where every program starts."""
        self._move(self._newest, 0)
        self.select(0)

    def stand_at(self, slot: int) -> None:
        """Take the version in ``slot``, written there already, as the newest."""
        if slot != self._newest and not self._rounds:
            for master, view in zip(self._masters.values(), self._views[slot], strict=True):
                master.data = view
        self._newest = slot

    def _move(self, read: int, write: int) -> None:
        if read != write:
            for source, target in zip(self._flats[read], self._flats[write], strict=True):
                target.copy_(source)
        self.stand_at(write)
