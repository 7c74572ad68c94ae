"""Stands in for CUDA graphs on a CPU: records the operators of a stage and repeats them on the same tensors.

As under a capture, recording leaves no trace: what the operators wrote is put back.
"""

from __future__ import annotations

from typing import Any

import torch
from harness import FORWARDS
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Tape(TorchDispatchMode):
    """What was recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, dict[int, Tensor]]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.made: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.detach(), (args, kwargs or {}))
        given = {_place(t) for t in _tensors((args, kwargs))}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes or "batch_norm" in str(func):  # whose schema hides that it writes
                for tensor in _tensors(value):
                    self._keep(tensor)
        out = func(*args, **kwargs)
        fresh = {i: t.detach() for i, t in enumerate(_tensors(out)) if _place(t) not in given}
        self.made.update({_place(t): t for t in fresh.values()})
        self.calls.append((func, args, kwargs, fresh))
        return out

    def _keep(self, tensor: Tensor) -> None:
        place = _place(tensor)
        if place not in self.made and place not in self.before:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self.before[place] = (whole, whole.clone())

    def restore(self) -> None:
        for whole, value in self.before.values():
            whole.copy_(value)
        self.before.clear()

    def replay(self) -> None:
        with FORWARDS, torch.no_grad():
            for func, args, kwargs, fresh in self.calls:
                out = _tensors(func(*args, **kwargs))
                for i, target in fresh.items():
                    target.copy_(out[i])


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class TapeDraws:
    """Random numbers on tapes: the seed is set, as set last, before each call that draws."""

    def __init__(self) -> None:
        self.seeds: dict[str, int] = {}

    def attach(self, tape: Tape) -> None:
        self.tape = tape

    def draw(self, key: str, seed: int, call: Any) -> None:
        torch.default_generator.manual_seed(seed)
        self.tape.calls.append((self._seed, (key,), {}, {}))
        call()

    def _seed(self, key: str) -> None:
        torch.default_generator.manual_seed(self.seeds[key])

    def start(self, seeds: Any) -> None:
        self.seeds = dict(seeds)


class TapeCapturer:
    """A `Capturer` of tapes."""

    scratch = None

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def new_pool(self) -> None:
        return None

    def settle(self) -> None:
        pass

    def draws(self, keys: Any) -> TapeDraws:
        return TapeDraws()

    def capture(self, pool: Any, work: Any, draws: TapeDraws | None = None) -> Tape:
        tape = Tape()
        if draws is not None:
            draws.attach(tape)
        try:
            with tape:
                work()
        finally:
            tape.restore()
        self.tapes.append(tape)
        return tape
