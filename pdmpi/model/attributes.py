"""The tensors that a model holds, by path, and a snapshot that undoes what a forward changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from pdmpi.model.tree import tensors_of

__all__ = ["Snapshot", "tensor_paths"]


def tensor_paths(root: nn.Module) -> dict[int, tuple[Tensor, str]]:
    """Return each parameter, buffer and plain tensor attribute with its path, by the tensor's id."""
    found: dict[int, tuple[Tensor, str]] = {}
    for path, module in root.named_modules():
        for name, value in _held(module, module.__dict__):
            if isinstance(value, Tensor):
                found.setdefault(id(value), (value, f"{path}.{name}" if path else name))
    return found


class Snapshot:
    """What every module of a model holds in attributes, buffers, lists and dictionaries."""

    def __init__(self, root: nn.Module) -> None:
        self._modules = dict(root.named_modules())
        self._plain = {path: dict(module.__dict__) for path, module in self._modules.items()}
        self._inside: dict[str, dict[str, list[Any] | dict[Any, Any]]] = {
            path: {
                name: list(value) if isinstance(value, list) else dict(value)
                for name, value in held.items()
                if isinstance(value, (list, dict))
            }
            for path, held in self._plain.items()
        }
        self._owners = {
            path: [module for module in found.modules() if module._parameters]
            for path, found in self._modules.items()
        }
        self._parameters = {
            id(module): dict(module._parameters) for module in self._modules.values() if module._parameters
        }

    def changed(self, path: str) -> str | None:
        """Return the name under which the module at ``path`` keeps a tensor that it did not hold before."""
        module, plain = self._modules[path], self._plain[path]
        before = {id(tensor) for _, value in _held(module, plain) for tensor in tensors_of(value)}
        for held in self._inside[path].values():
            before.update(map(id, tensors_of(list(held.values()) if isinstance(held, dict) else held)))
        for name, value in _held(module, module.__dict__):
            if any(id(tensor) not in before for tensor in tensors_of(value)):
                return name
        return None

    def swapped(self, path: str) -> bool:
        """Whether parameters of the module at ``path``, or of one inside, are not the ones they were."""
        return any(
            module._parameters.get(name) is not value
            for module in self._owners[path]
            for name, value in self._parameters[id(module)].items()
        )

    def restore(self) -> None:
        """Put everything back."""
        for path, module in self._modules.items():
            module.__dict__.clear()
            module.__dict__.update(self._plain[path])
            for name, held in self._inside[path].items():
                value = self._plain[path][name]
                value.clear()
                if isinstance(held, dict):
                    value.update(held)
                else:
                    value.extend(held)


def _held(module: nn.Module, plain: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from plain["_parameters"].items()
    yield from plain["_buffers"].items()
    yield from ((n, v) for n, v in plain.items() if not n.startswith("_") and n != "training")
