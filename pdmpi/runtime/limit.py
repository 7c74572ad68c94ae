"""What the norm of an update's gradients decides: how far they are clipped, or that it is left out.

In schedules that flush, all stages update at the same point of the run, and the norm is that of
the whole model's gradients: every stage brings its sum of squares, once whatever its replicas (a
shared parameter lies in one stage and counts once), and every rank adds them in the order of
the stages, so that all decide alike, to the bit.  In asynchronous schedules stages update
at different times, and each clips by its own norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdmpi.config.run import RunConfig
from pdmpi.plan.plan import Plan
from pdmpi.plan.terms import SCHEDULES
from pdmpi.runtime.loss_scale import LossScale
from pdmpi.runtime.slots import Allocate
from pdmpi.transport.base import Request, Transport

__all__ = [
    "JointLimit", "Limit", "Limited", "Verdict", "limit_notes", "limit_of", "limit_problems",
    "looks_into_updates", "squared_norm", "updates_jointly",
]  # fmt: skip

_EPSILON = 1e-6
"""Added to the norm, as `torch.nn.utils.clip_grad_norm_` does."""


@dataclass(frozen=True)
class Verdict:
    """What happens to the gradients of one update.

    Attributes
    ----------
    factor
        What they are multiplied by, of no dimensions; None for nothing.
    applies
        Whether the update is made.
    """

    factor: Tensor | None = None
    applies: bool = True


class Limit:
    """The rule by which gradients are clipped and updates left out.

    Parameters
    ----------
    clip_norm
        Largest norm; None for any.
    loss_scale
        Told of overflows; None where none can be.
    """

    def __init__(self, clip_norm: float | None, loss_scale: LossScale | None) -> None:
        self._clip_norm = clip_norm
        self.loss_scale = loss_scale

    def judge(self, squared: Tensor) -> Verdict:
        """Decide by the sum of the squares of an update's gradients, once for each update."""
        if self.loss_scale is not None:
            overflowed = not math.isfinite(float(squared))
            self.loss_scale.learn(overflowed)
            if overflowed:
                return Verdict(applies=False)
        if self._clip_norm is None:
            return Verdict()
        return Verdict(torch.clamp(self._clip_norm / (squared.sqrt() + _EPSILON), max=1.0))


class Limited(Protocol):
    """A stage whose updates wait for a verdict on all stages."""

    def gather(self) -> Sequence[Tensor]:
        """Return the gradients of the next update, averaged and without the loss scale."""

    def accept(self, verdict: Verdict) -> None:
        """Take the verdict on it."""


class JointLimit:
    """One rank's part in the sum over all stages before they update together.

    Parameters
    ----------
    limit
        The rule.
    players
        The rank's stages, by stage.
    brings
        Those whose norm this rank brings: it plays their first replica.
    num_stages
        Of the plan.
    transport, ranks
        What sums, over all ranks.
    allocate
        Makes memory that it sums.
    """

    def __init__(
        self,
        limit: Limit,
        players: Mapping[int, Limited],
        *,
        brings: Sequence[int],
        num_stages: int,
        transport: Transport,
        ranks: Sequence[int],
        allocate: Allocate,
    ) -> None:
        self._limit = limit
        self._players = players
        self._brings = frozenset(brings)
        memory, buffer = allocate(8 * num_stages)
        self._parts = memory.view(torch.float64)
        self._sum = transport.bind_allreduce(buffer, "float64", ranks)
        self._request: Request | None = None

    def post(self) -> None:
        """Bring this rank's norms; what the others leave at zero is added without rounding."""
        self._parts.zero_()
        for stage, player in self._players.items():
            gradients = player.gather()
            if stage in self._brings:
                self._parts[stage] = squared_norm(gradients, self._parts.device)
        self._request = self._sum.post()

    def wait(self) -> None:
        """Wait for all stages' norms and tell the stages the verdict."""
        assert self._request is not None
        self._request.wait()
        verdict = self._limit.judge(self._parts.sum())
        for player in self._players.values():
            player.accept(verdict)


def squared_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of some gradients in float64, of no dimensions, on their device."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(list(gradients))
    return torch.stack([norm.to(torch.float64) for norm in norms]).square().sum()


def scales_loss(config: RunConfig) -> bool:
    """Whether the loss is scaled, so that gradients can overflow."""
    return config.train.dtype == "float16"


def is_limited(config: RunConfig) -> bool:
    """Whether anything depends on the norm of gradients."""
    return config.optimizer.clip_norm is not None or scales_loss(config)


def looks_into_updates(config: RunConfig) -> bool:
    """Whether a run looks at gradients or momentum between updates, so that no one kernel can make them."""
    return is_limited(config) or config.schedule.weight_prediction


def limit_of(config: RunConfig) -> Limit | None:
    """Return the rule that a configuration asks for, if any."""
    if not is_limited(config):
        return None
    return Limit(config.optimizer.clip_norm, LossScale() if scales_loss(config) else None)


def updates_jointly(config: RunConfig, plan: Plan) -> bool:
    """Whether updates wait for a sum over all stages."""
    return is_limited(config) and len(plan.stages) > 1 and SCHEDULES[plan.schedule.name].flushes


def limit_problems(config: RunConfig) -> list[str]:
    """Return why gradients cannot be limited as the configuration asks."""
    name = config.schedule.name
    if not scales_loss(config) or name not in SCHEDULES or SCHEDULES[name].flushes:
        return []
    return [
        '[train] dtype = "float16" needs one loss scale for all stages and an overflow that all of them '
        f'leave out, but schedule {name!r} updates stages at different times; set dtype = "bfloat16", or '
        "take a schedule that flushes (1f1b, gpipe, zb-h1)"
    ]


def limit_notes(config: RunConfig, plan: Plan) -> list[str]:
    """Return what the user should know of how gradients are limited, a line each."""
    if config.optimizer.clip_norm is None or len(plan.stages) == 1:
        return []
    norm = f"[optimizer] clip_norm = {config.optimizer.clip_norm:g}"
    if SCHEDULES[plan.schedule.name].flushes:
        return [f"{norm} limits the norm of all stages' gradients together"]
    return [
        f"{norm} limits each stage's gradients by themselves: schedule {plan.schedule.name!r} updates "
        "stages at different times (schedules that flush clip by the norm of the whole model)"
    ]
