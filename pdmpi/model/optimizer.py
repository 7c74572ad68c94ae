"""The optimizer that a configuration names, and its groups of parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from pdmpi.config.run import OptimizerConfig
from pdmpi.errors import InputError, nearest

__all__ = ["check_optimizer", "make_optimizer", "parameter_groups"]

_NAMED = 6
"""Parameters that an error names."""


def make_optimizer(
    config: OptimizerConfig,
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    device: torch.device | str = "cpu",
) -> torch.optim.Optimizer:
    """Return an optimizer of ``torch.optim`` over some parameters (or groups of them).

    On a GPU it runs few large kernels and keeps its state there, unless the arguments say otherwise.

    Raises
    ------
    InputError
        For an unknown name, arguments that it does not take, or one that needs a closure.
    """
    classes = {
        name: found
        for name, found in vars(torch.optim).items()
        if isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
    }
    if config.name not in classes or config.name in ("Optimizer", "LBFGS"):
        known = classes.keys() - {"Optimizer", "LBFGS"}
        raise InputError(
            f"[optimizer] name = {config.name!r} is no optimizer of torch.optim that steps without a closure"
            + nearest(config.name, known)
        )
    try:
        chosen = classes[config.name]
        args = {**_device_args(chosen, torch.device(device), config.args), **config.args}
        made: torch.optim.Optimizer = chosen(parameters, **args)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"[optimizer] {config.name} does not work with args = {config.args}: {error}"
        ) from error
    return made


def _device_args(
    chosen: type[torch.optim.Optimizer], device: torch.device, given: Mapping[str, Any]
) -> dict[str, bool]:
    """Return the arguments for fused kernels and for state on the device, where a class has them."""
    if device.type != "cuda":
        return {}
    known = inspect.signature(chosen).parameters
    fuses = "fused" in known and not given.keys() & {"foreach", "fused", "differentiable"}
    wanted = {"fused": fuses, "capturable": "capturable" in known}
    return {name: True for name, is_wanted in wanted.items() if is_wanted}


def parameter_groups(
    config: OptimizerConfig, masters: Mapping[str, nn.Parameter], names: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """Return a stage's parameters in the groups of the configuration, for `make_optimizer`.

    Parameters
    ----------
    config
        The optimizer's configuration.
    masters
        What it steps, by name.
    names
        All names of each of them in the model: a shared parameter has several, any of which may match.

    Returns
    -------
    list of dict
        Those groups that are not empty, with their ``index``; parameters that nothing matches come first, as
        group 0.
    """
    members: list[list[nn.Parameter]] = [[] for _ in range(len(config.groups) + 1)]
    for name, master in masters.items():
        members[1 + _group_of(config, names[name])].append(master)
    arguments = [{}, *(group.args for group in config.groups)]
    return [
        {"params": held, "index": index, **args}
        for index, (held, args) in enumerate(zip(members, arguments, strict=True))
        if held
    ]


def _group_of(config: OptimizerConfig, names: Sequence[str]) -> int:
    """Return the first group that matches any of a parameter's names; -1 for none."""
    for index, group in enumerate(config.groups):
        if any(fnmatchcase(name, pattern) for pattern in group.match for name in names):
            return index
    return -1


def check_optimizer(config: OptimizerConfig, names: Iterable[str]) -> list[str]:
    """Return what is wrong with an optimizer and its groups for a model with parameters of these names.

    Each pattern matches a parameter, and each argument is one that the optimizer takes.
    """
    known = list(names)
    problems = []
    try:
        plain = make_optimizer(config, [nn.Parameter(torch.zeros(1))])
    except InputError as error:
        return [str(error)]
    for group in config.groups:
        problems += [
            f"[[optimizer.groups]] match = {pattern!r} matches no parameter of the model; it has "
            + ", ".join([*map(repr, known[:_NAMED]), *(["..."] if len(known) > _NAMED else [])])
            for pattern in group.match
            if not any(fnmatchcase(name, pattern) for name in known)
        ]
        strange = [key for key in group.args if key not in plain.defaults]
        problems += [
            f"[[optimizer.groups]] args: {config.name} takes no {key!r}{nearest(key, plain.defaults)}"
            for key in strange
        ]
        if not strange:
            together = config.model_copy(update={"args": {**config.args, **group.args}})
            try:
                make_optimizer(together, [nn.Parameter(torch.zeros(1))])
            except InputError as error:
                problems.append(str(error).replace("[optimizer]", "[[optimizer.groups]]", 1))
    return problems
