"""Loss and accuracy over a test set, summed up at the last stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pdmpi.graph import Ref
from pdmpi.model.trace import TracedModel
from pdmpi.model.tree import map_tree

__all__ = ["Score", "Scorer", "score_problems"]


@dataclass
class Score:
    """Sums over samples.

    Attributes
    ----------
    samples
        Samples that were counted.
    loss_sum
        Sum of their losses.
    correct
        Predictions that were right; None where the output is no classification.
    predictions
        Predictions that were made: samples, or positions of sequences.
    """

    samples: int = 0
    loss_sum: float = 0.0
    correct: int | None = None
    predictions: int = 0

    def __add__(self, other: Score) -> Score:
        known = [c for c in (self.correct, other.correct) if c is not None]
        return Score(
            self.samples + other.samples,
            self.loss_sum + other.loss_sum,
            sum(known) if known else None,
            self.predictions + other.predictions,
        )

    @property
    def loss(self) -> float:
        """Mean loss of a sample."""
        return self.loss_sum / max(self.samples, 1)

    @property
    def accuracy(self) -> float | None:
        """Fraction of right predictions, for a classification."""
        return None if self.correct is None else self.correct / max(self.predictions, 1)


@dataclass
class Scorer:
    """The criterion of an evaluation pass.

    Whole microbatches go through the pipeline; rows that only fill up the last one are left
    out here (`score_problems` refuses models where they cannot be).

    Attributes
    ----------
    num_samples, microbatch_size
        Of the test set.
    loss
        Mean loss of an output and a target.
    unflatten
        Makes the model's output of the last stage's values.
    """

    num_samples: int
    microbatch_size: int
    loss: Callable[[Any, Any], Tensor]
    unflatten: Callable[[Mapping[Ref, Tensor]], Any]
    score: Score = field(default_factory=Score)

    def __call__(self, values: Mapping[Ref, Tensor], target: Any, microbatch: int) -> Tensor:
        """Add one microbatch to the score and return its mean loss."""
        rows = min(self.microbatch_size, self.num_samples - microbatch * self.microbatch_size)
        if rows <= 0:
            return torch.zeros(())

        def valid(leaf: Any) -> Any:
            has_rows = isinstance(leaf, Tensor) and leaf.shape[:1] == (self.microbatch_size,)
            return leaf[:rows] if has_rows else leaf

        output, target = map_tree(valid, self.unflatten(values)), map_tree(valid, target)
        loss = self.loss(output, target)
        correct, predictions = _hits(output, target)
        self.score += Score(rows, float(loss) * rows, correct, predictions)
        return loss


def score_problems(traced: TracedModel, num_samples: int, microbatch_size: int) -> list[str]:
    """Return why a test set cannot be scored: a value without rows has those that fill up in it."""
    if num_samples % microbatch_size == 0:
        return []
    shapes = {ref: traced.graph.spec(ref).shape for ref in traced.returned(training=False)}
    whole = num_samples // microbatch_size * microbatch_size
    return [
        f"[data] the test set holds {num_samples} samples, which do not fill microbatches of "
        f"{microbatch_size}, and the model returns {str(ref)!r} of shape {shape}, from which the rows that "
        f"fill up the last one cannot be left out; give it {whole or microbatch_size} samples, or set "
        "[train] evaluate_every = 0"
        for ref, shape in shapes.items()
        if shape[:1] != (microbatch_size,)
    ]


def _hits(output: Any, target: Any) -> tuple[int | None, int]:
    """Count right predictions of a classifier: scores in dimension 1, class numbers as targets."""
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
        return None, 0
    classes = output.dim() >= 2 and output.is_floating_point() and not target.is_floating_point()
    if not classes or output.shape[:1] + output.shape[2:] != target.shape:
        return None, 0
    return int((output.argmax(1) == target).sum()), target.numel()
