"""Real copies of submodules and tensors that were made without memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pdmpi.model.deferred import Tape

__all__ = ["Materialiser"]


class Materialiser:
    """Copies parts of a model on ``meta`` into another module, with real memory.

    Parameters
    ----------
    root
        The model.
    tape
        Makes its tensors real.
    device
        Where the copies live.

    Attributes
    ----------
    module_of
        The copies of submodules, by path.
    owner_of
        (module, name) of the copies of single tensors, by path.
    """

    def __init__(self, root: nn.Module, tape: Tape, device: torch.device) -> None:
        self._root = root
        self._tape = tape
        self._device = device
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._moved: dict[int, torch.UntypedStorage] = {}
        self._memo: dict[int, Any] = {}
        self.module_of: dict[str, nn.Module] = {}
        self.owner_of: dict[str, tuple[nn.Module, str]] = {}

    def whole(self) -> nn.Module:
        """Return a real copy of the whole model."""
        return self.copy_of("")

    def copy_of(self, path: str) -> nn.Module:
        """Return a real copy of one submodule; copies share what the submodules share."""
        source = self._root.get_submodule(path)
        for parameter in source.parameters():
            self._parameter(parameter)
        with _RealCopies(self.real):
            copied: nn.Module = copy.deepcopy(source, self._memo)
        return copied

    def modules(self, stage: nn.Module, paths: Iterable[str]) -> None:
        """Put real copies of submodules at their paths."""
        for path in paths:
            copied = self.copy_of(path)
            parent, name = _container(stage, path)
            parent._modules[name] = copied
            self.module_of[path] = copied

    def tensors(self, stage: nn.Module, paths: Iterable[str]) -> None:
        """Put single real parameters, buffers and plain tensors at their paths."""
        for path in paths:
            parent_path, _, name = path.rpartition(".")
            source = self._root.get_submodule(parent_path)
            parent, _ = _container(stage, path)
            if source._parameters.get(name) is not None:
                parent._parameters[name] = self._parameter(source._parameters[name])
            elif source._buffers.get(name) is not None:
                parent._buffers[name] = self.real(source._buffers[name])
                if name in source._non_persistent_buffers_set:
                    parent._non_persistent_buffers_set.add(name)
            else:
                parent.__dict__[name] = self.real(getattr(source, name))
            self.owner_of[path] = (parent, name)

    def real(self, tensor: Any) -> Tensor:
        """Return the tensor's real copy; copies of one tensor are one tensor."""
        if id(tensor) not in self._memo:
            made = self._tape.realise(tensor, self._storages)
            if made is tensor:
                made = tensor.detach().clone()
            self._memo[id(tensor)] = self._on_device(made)
        return self._memo[id(tensor)]  # type: ignore[no-any-return]

    def _parameter(self, parameter: Any) -> nn.Parameter:
        if id(parameter) not in self._memo:
            made = self._tape.realise(parameter.detach(), self._storages)
            if made.device.type != "meta" and not self._tape.knows(parameter.detach()):
                made = made.clone()
            copied = nn.Parameter(self._on_device(made), requires_grad=parameter.requires_grad)
            copied.__dict__.update(parameter.__dict__)
            self._memo[id(parameter)] = copied
        return self._memo[id(parameter)]  # type: ignore[no-any-return]

    def _on_device(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return tensor
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key not in self._moved:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._moved[key] = flat.to(self._device).untyped_storage()
        moved = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return moved.set_(self._moved[key], tensor.storage_offset(), tensor.shape, tensor.stride())


class _RealCopies(TorchFunctionMode):
    """While a module is copied, copies of its tensors get real memory."""

    def __init__(self, real: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._real = real

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__deepcopy__:
            return self._real(args[0])
        return func(*args, **(kwargs or {}))


def _container(stage: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the module that holds the last part of a path, made of empty modules where there is none."""
    *parents, name = path.split(".")
    module = stage
    for part in parents:
        if module._modules.get(part) is None:
            module._modules[part] = nn.Module()
        module = module._modules[part]  # type: ignore[assignment]
    return module, name
