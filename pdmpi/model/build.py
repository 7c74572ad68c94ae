"""From names to callables, and from a traced model to one stage's module with real weights."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pdmpi.errors import InputError, nearest
from pdmpi.model.stage import StageModule
from pdmpi.model.steps import Steps

if TYPE_CHECKING:
    from pdmpi.model.trace import TracedModel

__all__ = ["build_stage", "load_factory"]


def load_factory(name: str) -> Callable[..., Any]:
    """Import what ``"module:callable"`` names.

    Raises
    ------
    InputError
        When the module cannot be imported or has no such callable.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(
            f"factory = {name!r}: cannot import {module_name!r} ({error}); "
            "install it, or put its folder on PYTHONPATH"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        known = [n for n in vars(module) if not n.startswith("_") and callable(getattr(module, n))]
        raise InputError(
            f"factory = {name!r}: {module_name!r} has no callable {attribute!r}{nearest(attribute, known)}"
        )
    return found  # type: ignore[no-any-return]


def build_stage(
    traced: TracedModel,
    layers: Iterable[str],
    *,
    seed: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    last: bool | None = None,
) -> StageModule:
    """Return a module that runs some layers, with real weights for these alone.

    Parameters
    ----------
    traced
        The whole model without memory.
    layers
        Names of the stage's layers, in any order.
    seed
        Seed of dropout masks; the trace's own by default.  (Weights follow the seed of the trace.)
    dtype
        Type of parameters; the trace's own by default.
    device
        Where parameters live.
    last
        Whether this is the last stage, whose outputs are the model's; by default whether
        it holds the last layer.

    Raises
    ------
    InputError
        For a layer that the model does not have.
    """
    chosen = set(layers)
    InputError.collect(
        f"stage names layer {name!r}, which the model does not have{nearest(name, traced.graph.index)}"
        for name in sorted(chosen - set(traced.graph.index))
    )
    graph = traced.graph
    is_last = graph.layers[-1].name in chosen if last is None else last
    order = [layer.name for layer in graph.layers if layer.name in chosen]
    stage = StageModule()
    real = _Materialiser(traced, torch.device(device))
    owned = [traced.state[name] for name in order]
    real.modules(stage, dict.fromkeys(path for state in owned for path in state.modules))
    real.tensors(stage, dict.fromkeys(path for state in owned for path in state.tensors))
    if dtype is not None and dtype != traced.dtype:
        stage.to(dtype)
    steps = Steps.compile(
        traced,
        order,
        is_last=is_last,
        seed=traced.seed if seed is None else seed,
        device=torch.device(device),
        modules=real.module_of,
        tensors=real.owner_of,
        constant=real.real,
    )
    stage.adopt(steps)
    return stage.train()


class _Materialiser:
    """Copies parts of a traced model into a stage, with real memory."""

    def __init__(self, traced: TracedModel, device: torch.device) -> None:
        self._traced = traced
        self._device = device
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._moved: dict[int, torch.UntypedStorage] = {}
        self._memo: dict[int, Any] = {}
        self.module_of: dict[str, nn.Module] = {}
        self.owner_of: dict[str, tuple[nn.Module, str]] = {}

    def modules(self, stage: nn.Module, paths: Iterable[str]) -> None:
        """Put real copies of submodules at their paths."""
        for path in paths:
            source = self._traced.module.get_submodule(path)
            if id(source) not in self._memo:
                for parameter in source.parameters():
                    self._parameter(parameter)
            with _RealCopies(self.real, self._memo):
                copied = copy.deepcopy(source, self._memo)
            parent, name = _container(stage, path)
            parent._modules[name] = copied
            self.module_of[path] = copied

    def tensors(self, stage: nn.Module, paths: Iterable[str]) -> None:
        """Put single real parameters, buffers and plain tensors at their paths."""
        for path in paths:
            parent_path, _, name = path.rpartition(".")
            source = self._traced.module.get_submodule(parent_path)
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
            made = self._traced.tape.realise(tensor, self._storages)
            if made is tensor:
                made = tensor.detach().clone()
            self._memo[id(tensor)] = self._on_device(made)
        return self._memo[id(tensor)]  # type: ignore[no-any-return]

    def _parameter(self, parameter: Any) -> nn.Parameter:
        if id(parameter) not in self._memo:
            made = self._traced.tape.realise(parameter.detach(), self._storages)
            if made.device.type != "meta" and not self._traced.tape.knows(parameter.detach()):
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

    def __init__(self, real: Callable[[Tensor], Tensor], memo: dict[int, Any]) -> None:
        super().__init__()
        self._real = real
        self._memo = memo

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
