"""The optimizer that a configuration names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from pdmpi.config.run import OptimizerConfig
from pdmpi.errors import InputError, nearest

__all__ = ["make_optimizer"]


def make_optimizer(
    config: OptimizerConfig, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Return an optimizer of ``torch.optim`` over some parameters (or groups of them).

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
        made: torch.optim.Optimizer = classes[config.name](parameters, **config.args)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"[optimizer] {config.name} does not work with args = {config.args}: {error}"
        ) from error
    return made
