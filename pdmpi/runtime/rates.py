"""The learning rate of each update of one stage: what schedulers make of it, and a smaller one at first.

A stage with lag L (`pdmpi.schedule.staleness`) steps w[t+1] = w[t] - lr[t] g(w[t-L]).

Warm-up.  lr[t] is divided by (L + 1)^(1 - min(t / K, 1)) over the first K updates of a run: PipeMare's
first technique (Yang et al., MLSys 2021, arXiv:1910.05124, section 3.1, "learning rate rescheduling").
PipeMare divides by its delay in slots; L + 1 leaves a stage without lag alone.  t counts all updates of
the run, as the present plan would have made them.
"""

from __future__ import annotations

import torch

from pdmpi.config.run import OptimizerConfig, RunConfig
from pdmpi.model.lr_schedule import LrSchedule
from pdmpi.schedule.program import Program
from pdmpi.schedule.staleness import version_lag

__all__ = ["Rates", "changes_rates", "rates_of"]


class Rates:
    """Sets the learning rate of each update.

    Parameters
    ----------
    optimizer
        Of the stage, over groups of `pdmpi.model.optimizer.parameter_groups`; None where it trains nothing.
    config
        The schedulers.
    microbatches
        Of a minibatch.
    microbatches_per_update
        Over all replicas.
    lag
        The stage's version lag in the steady state.
    warmup
        Updates over which the learning rate rises to what the schedulers make it; 0 for none.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        config: OptimizerConfig,
        *,
        microbatches: int,
        microbatches_per_update: int,
        lag: int,
        warmup: int,
    ) -> None:
        self._groups = [] if optimizer is None else optimizer.param_groups
        self._given = [float(group["lr"]) for group in self._groups]
        self._schedule = LrSchedule(config) if config.lr_schedulers else None
        self._by_epoch = config.lr_interval == "epoch"
        self._microbatches = microbatches
        self._per_update = microbatches_per_update
        self._lag = lag
        self._warmup = warmup
        self._first, self._updates, self._epoch = 0, 0, 0

    def begin(self, first: int, epoch: int) -> None:
        """Start a program after ``first`` microbatches of the run, so that a resumed run goes on alike.

        They need be no whole updates: the plan may have been another.
        """
        self._first, self._updates, self._epoch = first, 0, epoch

    def next(self) -> list[float]:
        """Return the learning rate of each group in the update that follows."""
        self._set()
        return [float(group["lr"]) for group in self._groups]

    def step(self) -> None:
        """Set the learning rate of the update that follows, and go on to the one after it."""
        self._set()
        self._updates += 1

    def _set(self) -> None:
        factor = 1.0
        if self._warmup:
            made = self._first // self._per_update + self._updates
            factor = float((self._lag + 1) ** (min(made / self._warmup, 1.0) - 1.0))
        if self._schedule is None:
            for group, rate in zip(self._groups, self._given, strict=True):
                group["lr"] = rate * factor
            return
        knobs = self._schedule.at(self._epoch if self._by_epoch else self._minibatches())
        for group in self._groups:
            group.update(knobs[group["index"]])
            group["lr"] *= factor

    def _minibatches(self) -> int:
        """Return the minibatches of the run before the update that follows."""
        return (self._first + self._updates * self._per_update) // self._microbatches


def changes_rates(config: RunConfig) -> bool:
    """Whether learning rates differ from one update to the next."""
    return bool(config.optimizer.lr_schedulers or config.schedule.staleness_warmup)


def rates_of(
    config: RunConfig, training: Program, stage: int, optimizer: torch.optim.Optimizer | None
) -> Rates | None:
    """Return the rates of a stage, None where they stay and nothing asks for them."""
    if not (changes_rates(config) or config.schedule.weight_prediction):
        return None
    return Rates(
        optimizer,
        config.optimizer,
        microbatches=config.schedule.microbatches,
        microbatches_per_update=training.microbatches_per_update[stage],
        lag=int(version_lag(training)[stage].max(initial=0)),
        warmup=config.schedule.staleness_warmup,
    )
