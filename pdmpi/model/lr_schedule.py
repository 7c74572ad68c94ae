"""Learning rates over a run, as the schedulers of ``torch.optim.lr_scheduler`` make them.

A scheduler steps an optimizer of its own here, which holds one number: what is asked for is the
rate at a step, whatever was asked for before.  So all stages and replicas, whose updates come at
different times, agree on it, and a resumed run needs nothing but its position.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
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
_SETTING = ("CyclicLR", "OneCycleLR")
"""Those that set rates themselves, and momentum too."""
_TRIED = 1000
"""Steps of each turn that are tried beforehand."""


class LrSchedule:
    """The knobs of each group of parameters at each step of a run.

    Parameters
    ----------
    config
        Optimizer, groups and schedulers, as `lr_schedule_problems` passed them.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
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
        own = step - self._began
        total = _total_steps(self._scheduler)
        for _ in range(self._scheduler.last_epoch, own if total is None else min(own, total - 1)):
            self._scheduler.step()
        return [{k: g[k] for k in _KNOBS if k in g} for g in self._optimizer.param_groups]

    def ends_early(self, steps: int) -> list[str]:
        """Return which schedulers end before a run of so many steps does."""
        problems, left = [], steps
        for i, turn in enumerate(self._config.lr_schedulers):
            taken = min(left, turn.length or left)
            ends = _total_steps(self._start(i)[1])
            if ends is not None and ends < taken:
                problems.append(
                    f"[[optimizer.lr_schedulers]] {turn.name} ends after {ends} steps, the run has {taken} "
                    f"for it (one {self._config.lr_interval} each); set total_steps = {taken}"
                )
            left -= taken
        return problems

    def _start(self, turn: int) -> tuple[torch.optim.Optimizer, lr_scheduler.LRScheduler]:
        """Return the scheduler of a turn at its first step, and what it steps."""
        plain = self._config.model_copy(update={"args": _knobs(self._config.args)})
        groups = [{}, *(_knobs(group.args) for group in self._config.groups)]
        optimizer = make_optimizer(
            plain, [{"params": [nn.Parameter(torch.zeros(1))], **group} for group in groups]
        )
        scheduler = _made(self._config.lr_schedulers[turn], optimizer)
        optimizer.step()  # torch warns of schedulers that are ahead of their optimizer
        return optimizer, scheduler


def lr_schedule_problems(config: OptimizerConfig) -> list[str]:
    """Return what is wrong with the schedulers of a configuration, a line each."""
    turns = config.lr_schedulers
    problems = [
        f"[[optimizer.lr_schedulers]] {problem}"
        for i, turn in enumerate(turns)
        for problem in _problems(config, turn, last=i == len(turns) - 1)
    ]
    if problems or not turns:
        return problems
    try:
        schedule, began = LrSchedule(config), 0
        for turn in turns:
            for step in range(min(turn.length or _TRIED, _TRIED)):
                schedule.at(began + step)
            began += turn.length or 0
    except InputError as error:
        return [str(error)]
    except Exception as error:  # whatever torch does with these arguments
        return [f"[[optimizer.lr_schedulers]] do not work: {type(error).__name__}: {error}"]
    return []


def _problems(config: OptimizerConfig, turn: LrSchedulerConfig, *, last: bool) -> Iterator[str]:
    """Yield what is wrong with one of the turns, beside what torch itself refuses."""
    if last and turn.length is not None:
        yield f"{turn.name} is the last one and goes on to the end; leave its length out"
    if not last and turn.length is None:
        yield f"{turn.name} is followed by another; set its length"
    if turn.name not in _CLASSES:
        yield (
            f"name = {turn.name!r} is no scheduler of torch.optim.lr_scheduler that needs numbers alone"
            + nearest(turn.name, _CLASSES.keys())
        )
        return
    known = inspect.signature(_CLASSES[turn.name]).parameters
    for key, value in turn.args.items():
        if key == "last_epoch":
            yield f"{turn.name}: the run's position sets last_epoch; leave it out"
        elif isinstance(value, str) and key in known and not isinstance(known[key].default, str):
            yield f"{turn.name}: {key} = {value!r} is no number"
        elif isinstance(value, list) and not all(isinstance(v, (int, float)) for v in value):
            yield f"{turn.name}: {key} = {value} holds more than numbers"
    if turn.name not in _SETTING:
        return
    own = [group for group in config.groups if "lr" in group.args]
    if own and not isinstance(turn.args.get("max_lr"), list):
        yield (
            f"{turn.name} gives all groups one rate, but [[optimizer.groups]] {list(own[0].match)} has its "
            f"own; set max_lr to {1 + len(config.groups)} rates, the first for parameters in no group"
        )
    if turn.args.get("cycle_momentum", True) and config.name == "SGD" and not config.args.get("momentum"):
        yield f"{turn.name} would give SGD a momentum; set cycle_momentum = false, or a momentum"


def _knobs(args: Mapping[str, Any]) -> dict[str, Any]:
    return {key: args[key] for key in _KNOBS if key in args}


def _total_steps(scheduler: lr_scheduler.LRScheduler) -> int | None:
    """Return the steps after which a scheduler cannot be asked again, if there is an end."""
    total: int | None = getattr(scheduler, "total_steps", None)
    return total


def _made(asked: LrSchedulerConfig, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    try:
        return _CLASSES[asked.name](optimizer, **asked.args)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InputError(
            f"[[optimizer.lr_schedulers]] {asked.name} does not work with args = {asked.args}: {error}"
        ) from error
