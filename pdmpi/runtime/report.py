"""What a run says of itself while it goes on: plain records, printed by whoever listens."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pdmpi.runtime.evaluation import Score

__all__ = ["Listener", "MetricsFile", "RankReport", "SegmentReport", "StageLag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLag:
    """The realised staleness of one stage's gradients, in updates between forward and update.

    Attributes
    ----------
    stage
        The stage.
    max, mean
        Over microbatches and replicas.
    """

    stage: int
    max: int
    mean: float

    @classmethod
    def of(cls, counts: Mapping[int, Mapping[int, int]]) -> tuple[StageLag, ...]:
        """Return one entry a stage from microbatches by lag; stages without updates are left out."""
        return tuple(
            cls(
                stage=stage,
                max=max(found),
                mean=sum(lag * n for lag, n in found.items()) / sum(found.values()),
            )
            for stage, found in sorted(counts.items())
            if found
        )


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank did in one program.

    Attributes
    ----------
    label
        Its stages and replicas.
    compute_s
        Seconds in forwards, backwards and updates.
    wait_s
        Seconds in waits.
    instructions
        Instructions that it ran.
    losses
        Mean loss of each microbatch that its last stage saw.
    lags
        Of each of its stages, microbatches by version lag.
    """

    label: str
    compute_s: float
    wait_s: float
    instructions: int
    losses: Mapping[int, float]
    lags: Mapping[int, Mapping[int, int]] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Encode for a message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> RankReport:
        """Decode a message."""
        fields = json.loads(data)
        losses = {int(k): v for k, v in fields["losses"].items()}
        lags = {int(s): {int(lag): n for lag, n in of.items()} for s, of in fields["lags"].items()}
        return cls(**{**fields, "losses": losses, "lags": lags})


@dataclass(frozen=True, kw_only=True)
class SegmentReport:
    """One training program, on rank 0.

    Attributes
    ----------
    epoch
        Counted from 0.
    first_minibatch, minibatches
        Which minibatches of the epoch.
    samples
        Samples trained.
    duration_s
        Until the slowest rank was drained.
    ranks
        What each rank did.
    learning_rate
        Of its last update at rank 0's first stage: of parameters in no group, or else of the first group.
        None where that stage trains nothing.
    loss_scale, skipped
        In float16: the loss scale at its end, and updates left out so far after an overflow.
    """

    epoch: int
    first_minibatch: int
    minibatches: int
    samples: int
    duration_s: float
    ranks: tuple[RankReport, ...] = field(repr=False)
    learning_rate: float | None = None
    loss_scale: float | None = None
    skipped: int = 0

    @property
    def samples_per_s(self) -> float:
        """Throughput, filling and draining of the pipeline included."""
        return self.samples / self.duration_s

    @property
    def losses(self) -> dict[int, float]:
        """Loss of each microbatch, in order."""
        merged = {k: loss for rank in self.ranks for k, loss in rank.losses.items()}
        return dict(sorted(merged.items()))

    @property
    def lags(self) -> dict[int, Counter[int]]:
        """Microbatches by version lag, of each stage."""
        found: dict[int, Counter[int]] = {}
        for rank in self.ranks:
            for stage, counts in rank.lags.items():
                found.setdefault(stage, Counter()).update(counts)
        return found

    @property
    def loss(self) -> float:
        """Mean loss."""
        losses = self.losses
        return sum(losses.values()) / max(len(losses), 1)


class Listener(Protocol):
    """Whoever shows a run to a person; called on rank 0 only."""

    def notice(self, text: str) -> None:
        """One line that a person should know."""

    def progress(self, epoch: int, done: int, total: int, loss: float) -> None:
        """Minibatches of the epoch that left the pipeline, and the last one's loss (NaN where unknown)."""

    def segment(self, report: SegmentReport) -> None:
        """Tell of a program that is done."""

    def evaluated(self, epoch: int, score: Score) -> None:
        """Tell of an evaluation pass that is done."""


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsFile:
    """Appends one JSON object a line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, kind: str, **values: object) -> None:
        """Append a record; numbers that JSON lacks (NaN, infinities) become null."""
        self._file.write(json.dumps({"kind": kind, **_finite(values)}, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
