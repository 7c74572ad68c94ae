"""Plays one replica of one stage: forward, recomputation, backward and update on named slots."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pdmpi.errors import PdmpiError
from pdmpi.graph import Ref
from pdmpi.model.precision import autocasting
from pdmpi.model.stage import StageModule
from pdmpi.runtime.boundary import Boundary
from pdmpi.runtime.feed import Batch, Feed
from pdmpi.runtime.gradients import GradientReducer
from pdmpi.runtime.joint_norm import JointNormalisation
from pdmpi.runtime.limit import Limit, Verdict, squared_norm
from pdmpi.runtime.prediction import WeightPrediction
from pdmpi.runtime.rates import Rates
from pdmpi.runtime.run import StageRun
from pdmpi.runtime.split import SplitBackward
from pdmpi.runtime.statistics import MinibatchStatistics
from pdmpi.runtime.weights import WeightRing
from pdmpi.schedule.program import NO_SLOT

__all__ = ["Criterion", "Player"]

Criterion = Callable[[Mapping[Ref, Tensor], Any, int], Tensor]
"""Returns the loss from the last stage's values, the target and the microbatch's number."""

_NOTHING_FED = Batch({}, None)


class Player:
    """One replica of one stage.

    Attributes
    ----------
    why_eager
        Why CUDA graphs that were to play it do not, on one line; empty otherwise.
    why_partly
        Why they play only some of its microbatches, likewise.

    Parameters
    ----------
    module
        The stage's layers.
    weights
        Its weight versions.
    boundary
        Its boundary regions.
    reducer
        Sums gradients over the stage's replicas; ``None`` for a straight stage.
    dtype
        Of the parameters; forwards and losses run in what `autocasting` gives for it.
    device
        Where it computes.
    scale
        Factor on the gradients before an update: one over the microbatches that it averages.
    rates
        Sets the learning rate of each update; None leaves it as it is.
    prediction
        Predicts weights; None uses them as they are.
    limit
        Clips gradients and leaves updates out, and knows the loss scale; None does neither.
    statistics
        Moves running statistics once an update; None lets layers do so for each microbatch.
    joint_norm
        Lets batch normalisations sum over the stage's replicas; None leaves each to its own.
    """

    why_eager = ""
    why_partly = ""

    def __init__(
        self,
        module: StageModule,
        weights: WeightRing,
        boundary: Boundary,
        *,
        reducer: GradientReducer | None,
        device: torch.device,
        scale: float,
        dtype: torch.dtype = torch.float32,
        rates: Rates | None = None,
        prediction: WeightPrediction | None = None,
        limit: Limit | None = None,
        statistics: MinibatchStatistics | None = None,
        joint_norm: JointNormalisation | None = None,
    ) -> None:
        self.module = module
        self.weights = weights
        self.boundary = boundary
        self._reducer = reducer
        self._device = device
        self._scale = scale
        self._dtype = dtype
        self._rates = rates
        self._prediction = prediction
        self._limit = limit
        self._statistics = statistics
        self._joint_norm = joint_norm
        self._loss_scale = None if limit is None else limit.loss_scale
        self._verdict: Verdict | None = None
        self._loss_gradient: Tensor | None = None
        self._feed: Feed | None = None
        self._criterion: Criterion | None = None
        self._first = 0
        self._saved: dict[int, StageRun] = {}
        self._fed: dict[int, Batch] = {}
        self.losses: dict[int, float | Tensor] = {}
        """Loss of each microbatch of the program, as far as it is known at this stage."""
        self.lags: Counter[int] = Counter()
        """Microbatches of the program by the updates that their stage made between forward and update."""
        self._used: list[int] = []
        self._leaves = _leaves(boundary)

    def begin(
        self,
        training: bool,
        feed: Feed | None,
        criterion: Criterion | None,
        first: int = 0,
        epoch: int = 0,
    ) -> None:
        """Prepare for a program.

        Parameters
        ----------
        training
            Mode of the module.
        feed
            Where the stage reads the model's inputs or targets, if it reads any.
        criterion
            At the last stage: the loss of a microbatch.
        first
            Microbatches of the run before this program, so that random masks differ between
            programs and not between a run and its resumption.
        epoch
            That it is part of, counted from 0.
        """
        assert not self._saved, "a program ends drained"
        self.module.train(training)
        self._feed = feed
        self._criterion = self.trained_by(criterion) if training and criterion else criterion
        self._first = first
        self._fed.clear()
        self.losses.clear()
        self.lags.clear()
        if self._rates is not None and training:
            self._rates.begin(first, epoch)

    def trained_by(self, criterion: Criterion) -> Criterion:
        """Return the loss that is called in training; nothing here is to be known of it."""
        return criterion

    def close(self) -> None:
        """Give up what must not outlive the transport: nothing here."""

    def follow(self, rows: Sequence[Sequence[int]], stage: int) -> None:
        """Read the rank's instructions of the program that follows; nothing here depends on them."""

    def forward(self, k: int, version: int, weights: int, inputs: int, output: int, saved: int) -> None:
        """Run the stage forward and fill its output slot."""
        if self._feed is not None:
            self._fed[k] = self._feed(k)
        self.compute_forward(k, version, weights, inputs, output, saved)

    def compute_forward(
        self, k: int, version: int, weights: int, inputs: int, output: int, saved: int
    ) -> None:
        """Do the same on data that has been fed."""
        if self._prediction is not None and self.module.training:
            self._prediction.forward(k, version, weights)
        else:
            self.weights.select(weights)
        run = self._run(k, inputs, keep=saved != NO_SLOT)
        if self._criterion is not None:
            assert run.loss is not None
            loss = run.loss.detach()
            self.losses[k] = float(loss) if loss.device.type == "cpu" else loss  # no wait for a device
        if saved != NO_SLOT:
            self._saved[saved] = run
        elif not self.module.training:
            self._fed.pop(k, None)
        for regions in self.boundary.outputs.values():
            region = regions[output]
            region.stamp(k, version)
            for ref, target in region.tensors.items():
                made = run.outputs[ref].detach()
                if made.shape != target.shape:
                    raise PdmpiError(
                        f"{ref.layer} returned shape {tuple(made.shape)} where {tuple(target.shape)} was "
                        "traced; every batch must have the same shapes (pad sequences to one length)"
                    )
                target.copy_(made)

    def recompute(self, k: int, version: int, weights: int, inputs: int, saved: int) -> None:
        """Run the stage forward again, this time keeping what the backward needs."""
        self._select_again(k, weights)
        self._saved[saved] = self._run(k, inputs, keep=True, recompute=True)

    def backward(self, k: int, version: int, weights: int, saved: int, grad_in: int, grad_out: int) -> None:
        """Accumulate the parameters' gradients and fill the slot of gradients for earlier stages."""
        self._select_again(k, weights)
        run = self._saved.pop(saved)
        roots, gradients, loss = self._roots(run, k, grad_in)
        if roots:
            torch.autograd.backward(roots, gradients)
        self._send_back(run, k, version, loss, grad_out)
        if self._prediction is not None:
            self._prediction.finish(k)

    def backward_input(
        self, k: int, version: int, weights: int, saved: int, grad_in: int, grad_out: int
    ) -> None:
        """Fill the slot of gradients for earlier stages; leave the parameters' gradients for later."""
        self._select_again(k, weights)
        run = self._saved[saved]
        roots, gradients, loss = self._roots(run, k, grad_in)
        wanted = [leaf for leaf in run.leaves.values() if leaf.requires_grad]
        kept = [None if g is None else g.clone() for g in gradients]  # outlives the slot it arrived in
        run.split = SplitBackward(roots, kept, wanted)
        run.split.input_part()
        self._send_back(run, k, version, loss, grad_out)

    def backward_weight(self, k: int, weights: int, saved: int) -> None:
        """Accumulate the parameters' gradients that `backward_input` left."""
        self._select_again(k, weights)
        split = self._saved.pop(saved).split
        assert split is not None
        split.weight_part()
        if self._prediction is not None:
            self._prediction.finish(k)

    def _select_again(self, k: int, weights: int) -> None:
        """Make the stage read the weights of a microbatch's forward."""
        if self._prediction is not None:
            self._prediction.again(k, weights)
        else:
            self.weights.select(weights)

    def _roots(self, run: StageRun, k: int, grad_in: int) -> tuple[list[Tensor], list[Tensor | None], float]:
        """Return where the backward starts, with which gradients, and the microbatch's loss."""
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        if run.loss is not None and run.loss.requires_grad:
            roots.append(run.loss)
            gradients.append(None if self._loss_scale is None else self._scaled(run.loss))
        self._fed.pop(k, None)
        known = self.losses.get(k, math.nan)
        loss = known if isinstance(known, float) else math.nan
        for regions in self.boundary.grad_inputs.values():
            region = regions[grad_in]
            loss = region.loss
            self.losses[k] = loss
            for ref, gradient in region.tensors.items():
                if run.outputs[ref].requires_grad:
                    roots.append(run.outputs[ref])
                    gradients.append(gradient.to(run.outputs[ref].dtype))
        return roots, gradients, loss

    def _scaled(self, loss: Tensor) -> Tensor:
        """Return the loss scale as the gradient of a loss, always in one place (which a graph may read)."""
        assert self._loss_scale is not None
        if self._loss_gradient is None or self._loss_gradient.dtype != loss.dtype:
            self._loss_gradient = torch.full_like(loss.detach(), self._loss_scale.value)
        return self._loss_gradient

    def _send_back(self, run: StageRun, k: int, version: int, loss: float, grad_out: int) -> None:
        self._used.append(version)
        for regions in self.boundary.grad_outputs.values():
            region = regions[grad_out]
            region.stamp(k, version, loss)
            for ref, target in region.tensors.items():
                gradient = run.leaves[ref].grad
                target.zero_() if gradient is None else target.copy_(gradient)
        for leaf in run.leaves.values():
            leaf.grad = None

    def loss_values(self) -> dict[int, float]:
        """Return the losses as numbers; waits for the device."""
        return {k: float(loss) for k, loss in self.losses.items()}

    def arm_reduce(self) -> None:
        """Let gradients leave for their sum as the next backward finishes them.

        Not beside sums of statistics: a parameter that one replica leaves unused would change their order.
        """
        assert self._reducer is not None
        if self._joint_norm is None:
            self._reducer.arm()

    def wait_reduce(self) -> None:
        """Wait for the sums."""
        assert self._reducer is not None
        self._reducer.wait()
        if self._statistics is not None:
            self._statistics.reduce()

    def update(self, version: int, read: int, write: int) -> None:
        """One optimizer step from a weight slot to another, which makes ``version``."""
        if self._rates is not None:
            self._rates.step()
        if self._joint_norm is not None:
            self._joint_norm.check()
        if self._statistics is not None:
            self._statistics.commit()
        if self._limit is None:
            self.weights.update(read, write, self._scale)
        else:
            self._limited_update(self._limit, read, write)
        self._note_lags(version)

    def _note_lags(self, version: int) -> None:
        self.lags.update(version - 1 - used for used in self._used)
        self._used.clear()

    def gather(self) -> list[Tensor]:
        """Return the gradients of the update that follows, averaged and without the loss scale."""
        scale = 1.0 if self._loss_scale is None else self._loss_scale.value
        return self.weights.gather(self._scale / scale)

    def accept(self, verdict: Verdict) -> None:
        """Take the verdict on the update that follows, whose gradients were gathered."""
        self._verdict = verdict

    def _limited_update(self, limit: Limit, read: int, write: int) -> None:
        """Clip the gradients, or leave the update out, by the norm of all stages or of this one."""
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            verdict = limit.judge(squared_norm(self.gather(), self._device))
        self.weights.step(read, write, factor=verdict.factor, applies=verdict.applies)
        if self._loss_gradient is not None and self._loss_scale is not None:
            self._loss_gradient.fill_(self._loss_scale.value)

    def _normalising(self, k: int, keep: bool, recompute: bool) -> AbstractContextManager[None]:
        if self._joint_norm is None:
            return nullcontext()
        return self._joint_norm.running(k, leaves=not keep and self.module.training, takes=recompute)

    def _run(self, k: int, inputs: int, *, keep: bool, recompute: bool = False) -> StageRun:
        fed = self._fed.get(k, _NOTHING_FED)
        with nullcontext() if keep else torch.no_grad(), autocasting(self._dtype, self._device):
            leaves = {ref: slots[inputs] for ref, slots in self._leaves.items()}
            if self._statistics is not None:
                self._statistics.counts = not recompute
            with self._normalising(k, keep, recompute):
                outputs = self.module({**fed.inputs, **leaves}, self._first + k, recompute)
            if self._criterion is not None:
                loss = self._criterion(outputs, fed.target, k)
                return StageRun(leaves, {}, loss)  # the backward starts at the loss
        return StageRun(leaves, outputs, None)


def _leaves(boundary: Boundary) -> dict[Ref, Sequence[Tensor]]:
    """Return, for each received value, one autograd leaf a slot, over the slot's own memory."""
    wanted = {ref for regions in boundary.grad_outputs.values() for ref in regions[0].tensors}
    return {
        ref: [region.tensors[ref].detach().requires_grad_(ref in wanted) for region in regions]
        for regions in boundary.inputs.values()
        for ref in regions[0].tensors
    }
