"""Running a model's forward on ``meta`` tensors, and seeing what it does below autograd."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pdmpi.model.deferred import META, storage_id, written
from pdmpi.model.tree import map_tree, tensors_of

__all__ = ["Observer", "OneStep", "place_of", "stand_in"]


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sends what a forward makes to ``meta``, and notes writes and random numbers.

    Attributes
    ----------
    random
        Whether random numbers were drawn since `reset`.
    writes
        Storages that were written since `reset`.
    real
        Let operations on real tensors run as they are.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random = False
        self.writes: set[int] = set()
        self.real = False

    def reset(self) -> None:
        """Forget what was seen."""
        self.random = False
        self.writes = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler, which takes seconds, for the sake of this mode."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        self.writes.update(storage_id(tensor) for tensor in written(func, args, kwargs))
        if self.real:
            return func(*args, **kwargs)
        tensors = tensors_of((args, kwargs))
        on_meta = [tensor.device.type == "meta" for tensor in tensors]
        if func is torch.ops.aten.lift_fresh.default and not any(on_meta):
            return stand_in(args[0])
        if func is torch.ops.aten._local_scalar_dense.default and any(on_meta):
            raise RuntimeError("what it does depends on the values of a tensor")
        if tensors and not any(on_meta):
            return func(*args, **kwargs)
        if func in _BATCH_NORMS:
            return _normalised(args[0])
        if "generator" in kwargs:
            kwargs["generator"] = None
        kwargs.pop("pin_memory", None)
        makes = not tensors and any(argument.name == "device" for argument in func._schema.arguments)
        if makes or isinstance(kwargs.get("device"), torch.device):
            kwargs["device"] = META
        return func(*map_tree(stand_in, args), **map_tree(stand_in, kwargs))


_BATCH_NORMS = (
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten._native_batch_norm_legit.default,
    torch.ops.aten._native_batch_norm_legit.no_stats,
)


def _normalised(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what batch normalisation does; torch's own way, on ``meta``, loads its compiler."""
    channels = x.shape[1]
    return torch.empty_like(x), x.new_empty(channels), x.new_empty(channels)


@dataclass(frozen=True, slots=True)
class OneStep:
    """The forward of a recurrent layer, run for one time step and stretched to all of them.

    On ``meta`` tensors torch runs such a layer step by step, which takes long and tells
    nothing more.
    """

    module: nn.RNNBase

    def __call__(self, x: Any, hx: Any = None) -> Any:
        """Return what the layer returns; see `torch.nn.LSTM`."""
        forward: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        if not isinstance(x, Tensor):
            return forward(x, hx)
        dim = 1 if self.module.batch_first and x.dim() == 3 else 0
        steps = x.shape[dim]
        if steps < 2:
            return forward(x, hx)
        out, state = forward(x.narrow(dim, 0, 1), hx)
        return torch.cat([out] * steps, dim), state


def stand_in(leaf: Any) -> Any:
    """Return a ``meta`` tensor of the same shape and kind for a real one; other leaves are themselves."""
    if not isinstance(leaf, Tensor) or leaf.device.type == "meta":
        return leaf
    made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=META)
    return made.requires_grad_().view_as(made) if leaf.requires_grad else made


def place_of(error: BaseException) -> str:
    """Return an error's first line, with the line of the user's code that raised it."""
    own = tuple(f"model/{name}.py" for name in ("record", "trace", "tree", "meta", "deferred", "constants"))
    stack = traceback.extract_tb(error.__traceback__)
    frames = [f for f in stack if "/torch/" not in f.filename and not f.filename.endswith(own)]
    place = f" ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
    text = str(error).strip()
    return f"{text.splitlines()[0] if text else type(error).__name__}{place}"
