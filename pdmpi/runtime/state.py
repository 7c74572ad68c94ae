"""Between torch and a checkpoint: a stage's tensors as named arrays, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from pdmpi.checkpoint.arrays import STORAGE, Array, Snapshot
from pdmpi.errors import InputError

__all__ = ["array_of", "masters_by_name", "restore", "snapshot_of", "state_names", "tensor_of"]

_SIGNED = {"uint8": torch.uint8, "uint16": torch.int16}


def array_of(tensor: Tensor) -> Array:
    """Return a tensor as an array on the host: a view where it lives there already, else a copy."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    host = tensor.detach().cpu().contiguous()
    if dtype in STORAGE:
        stored = STORAGE[dtype]
        return Array(host.view(_SIGNED[stored]).numpy().view(stored), dtype)
    return Array(host.numpy(), dtype)


def tensor_of(array: Array) -> Tensor:
    """Return an array as a tensor on the host, over the same memory."""
    bits = np.require(array.bits, requirements=["C", "W"])
    if array.dtype in STORAGE:
        bits = bits.view(np.int16) if array.dtype == "bfloat16" else bits
        return torch.from_numpy(bits).view(getattr(torch, array.dtype))
    return torch.from_numpy(bits)


def state_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a stage's parameters and buffers, as in the whole model's ``state_dict``."""
    return tuple(name for name, _ in _entries(module))


def masters_by_name(module: nn.Module, masters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the master of each trained parameter by all its names: a shared one has several."""
    first: dict[int, nn.Parameter] = {}
    found: dict[str, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in masters:
            first[id(parameter)] = masters[name]
        if id(parameter) in first:
            found[name] = first[id(parameter)]
    return found


def snapshot_of(
    module: nn.Module, masters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> Snapshot:
    """Return the state of one stage; the arrays are views of live tensors where those are on the host.

    Parameters
    ----------
    module
        The stage, reading the newest version of its weights.
    masters
        The parameters that ``optimizer`` steps, by name; stored in place of the module's
        own, of which they may be a version of higher precision.
    optimizer
        None for a stage that trains nothing.
    """
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    parameters: dict[str, Array] = {}
    buffers: dict[str, Array] = {}
    shared = masters_by_name(module, masters)
    for name, tensor in _entries(module):
        (parameters if name in names else buffers)[name] = array_of(shared.get(name, tensor))
    state = {
        name: {key: _scalar_or_array(name, key, value) for key, value in optimizer.state[master].items()}
        for name, master in masters.items()
        if optimizer is not None and master in optimizer.state
    }
    return Snapshot(
        parameters=parameters,
        buffers=buffers,
        optimizer={name: {k: v for k, v in keys.items() if v is not None} for name, keys in state.items()},
    )


def restore(
    snapshot: Snapshot,
    module: nn.Module,
    masters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Put a snapshot into one stage, bit for bit; what the stage does not own is left out.

    Raises
    ------
    InputError
        A shape or dtype differs; nothing has been changed then.
    """
    stored = {**snapshot.parameters, **snapshot.buffers}
    entries, shared = dict(_entries(module)), masters_by_name(module, masters)
    problems = []
    for name, own_tensor in entries.items():
        tensor = shared.get(name, own_tensor)
        own = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if name not in stored:
            problems.append(f"the checkpoint holds no {name!r}")
        elif own != (stored[name].dtype, stored[name].shape):
            problems.append(
                f"{name!r} is {stored[name].dtype}{stored[name].shape} in the checkpoint and"
                f" {own[0]}{own[1]} in the model; use the model and [train] dtype that it was made with"
            )
    InputError.collect(problems)
    with torch.no_grad():
        for name, tensor in entries.items():
            tensor.copy_(tensor_of(stored[name]))
        for name, master in masters.items():
            master.copy_(tensor_of(stored[name]))
            if optimizer is not None:
                _restore_optimizer(optimizer, master, snapshot.optimizer.get(name, {}))


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, master: nn.Parameter, arrays: Mapping[str, Array]
) -> None:
    """Replace what the optimizer keeps of one parameter; scalars (Adam's step) live where it wants them."""
    optimizer.state.pop(master, None)
    if not arrays:
        return
    group = next(g for g in optimizer.param_groups if any(p is master for p in g["params"]))
    scalars = master.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
    optimizer.state[master] = {
        key: tensor_of(array).to(master.device if array.shape else scalars, copy=True)
        for key, array in arrays.items()
    }


def _entries(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"{name!r} is a {type(value).__name__} (get_extra_state), which a checkpoint cannot hold;"
                " keep it in a buffer"
            )
        yield name, value


def _scalar_or_array(name: str, key: str, value: object) -> Array | None:
    match value:
        case None:
            return None
        case Tensor():
            return array_of(value)
        case bool() | int() | float():
            return Array.of(np.array(value))
    raise InputError(
        f"the optimizer keeps a {type(value).__name__} as {key!r} of {name!r}, which a checkpoint cannot"
        " hold; choose another optimizer, or [checkpoint] enabled = false"
    )
