"""Learning rates over a run, as the schedulers of ``torch.optim.lr_scheduler`` make them.

A scheduler steps an optimizer of its own here, which holds one number: what is asked for is the
rate at a step, whatever was asked for before.  So all stages and replicas, whose updates come at
different times, agree on it, and a resumed run needs nothing but its position.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from pdmpi.config.run import LrSchedulerConfig, OptimizerConfig
from pdmpi.errors import InputError, nearest
from pdmpi.model.optimizer import make_optimizer

__all__ = ["LrSchedule", "lr_schedule_problems"]

_KNOBS = ("lr", "momentum", "betas")
"""What schedulers change."""
_WANT_MORE = {
    "LRScheduler", "_LRScheduler",
    "LambdaLR", "MultiplicativeLR",  # a function
    "SequentialLR", "ChainedScheduler",  # other schedulers
    "ReduceLROnPlateau",  # a score
}  # fmt: skip
_CLASSES: dict[str, type[lr_scheduler.LRScheduler]] = {
    name: found
    for name, found in vars(lr_scheduler).items()
    if isinstance(found, type) and issubclass(found, lr_scheduler.LRScheduler) and name not in _WANT_MORE
}


class LrSchedule:
    """The knobs of each group of parameters at each step of a run.

    Parameters
    ----------
    config
        Optimizer, groups and schedulers.

    Raises
    ------
    InputError
        For an unknown scheduler, arguments that it does not take, or turns of no length.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        last = len(config.lr_schedulers) - 1
        for i, turn in enumerate(config.lr_schedulers):
            if (turn.length is None) != (i == last):
                raise InputError(
                    f"[[optimizer.lr_schedulers]] {turn.name} is the last one and goes on to the end; leave "
                    "its length out"
                    if i == last
                    else f"[[optimizer.lr_schedulers]] {turn.name} is followed by another; set its length"
                )
        self._turn, self._began = 0, 0
        self._optimizer, self._scheduler = self._start(0)

    def at(self, step: int) -> list[dict[str, Any]]:
        """Return the knobs at a step: of parameters in no group first, then of each group."""
        if step < self._began + self._scheduler.last_epoch:
            self._turn, self._began = 0, 0
            self._optimizer, self._scheduler = self._start(0)
        turns = self._config.lr_schedulers
        while (length := turns[self._turn].length) is not None and step >= self._began + length:
            self._turn, self._began = self._turn + 1, self._began + length
            self._optimizer, self._scheduler = self._start(self._turn)
        with warnings.catch_warnings():  # that its optimizer does not step
            warnings.simplefilter("ignore")
            for _ in range(self._scheduler.last_epoch, step - self._began):
                self._scheduler.step()
        return [{k: g[k] for k in _KNOBS if k in g} for g in self._optimizer.param_groups]

    def problems(self, steps: int) -> list[str]:
        """Return which schedulers end before a run of so many steps does."""
        problems, left = [], steps
        for i, turn in enumerate(self._config.lr_schedulers):
            taken = min(left, turn.length or left)
            ends = getattr(self._start(i)[1], "total_steps", None)
            if ends is not None and ends < taken:
                problems.append(
                    f"[[optimizer.lr_schedulers]] {turn.name} ends after {ends} steps, the run has {taken} "
                    f"for it (one {self._config.lr_interval} each); set total_steps = {taken}"
                )
            left -= taken
        return problems

    def _start(self, turn: int) -> tuple[torch.optim.Optimizer, lr_scheduler.LRScheduler]:
        """Return the scheduler of a turn at its first step, and what it steps."""
        asked = self._config.lr_schedulers[turn]
        plain = self._config.model_copy(update={"args": _knobs(self._config.args)})
        groups = [{}, *(_knobs(group.args) for group in self._config.groups)]
        optimizer = make_optimizer(
            plain, [{"params": [nn.Parameter(torch.zeros(1))], **group} for group in groups]
        )
        return optimizer, _made(asked, optimizer)


def _knobs(args: Mapping[str, Any]) -> dict[str, Any]:
    return {key: args[key] for key in _KNOBS if key in args}


def _made(asked: LrSchedulerConfig, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    if asked.name not in _CLASSES:
        raise InputError(
            f"[[optimizer.lr_schedulers]] name = {asked.name!r} is no scheduler of torch.optim.lr_scheduler "
            "that needs numbers alone" + nearest(asked.name, _CLASSES.keys())
        )
    try:
        return _CLASSES[asked.name](optimizer, **asked.args)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(
            f"[[optimizer.lr_schedulers]] {asked.name} does not work with args = {asked.args}: {error}"
        ) from error


def lr_schedule_problems(config: OptimizerConfig, steps: int) -> list[str]:
    """Return what is wrong with the schedulers of a run of so many steps."""
    if not config.lr_schedulers:
        return []
    try:
        return LrSchedule(config).problems(steps)
    except InputError as error:
        return [str(error)]
