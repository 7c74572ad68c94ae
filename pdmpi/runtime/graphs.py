"""Plays a stage by CUDA graphs: its kernels are recorded once for each set of slots, then launched as one.

Launched one by one from Python, the kernels of a transformer block take longer to launch
than to run.  A graph takes one launch; it reads and writes fixed addresses, which the
slots of a program are: weights, received and sent boundaries, gradients.

A microbatch's forward, backward and update are captured together, when a first one with its
set of slots comes along; nothing runs during a capture.  The first update of a run is played
eagerly, so that libraries and the optimizer have allocated what they keep.

Memory.  What a forward saves lies in a pool of its saved slot, all else in one scratch pool
of the rank, so that graphs share memory as far as they are never alive together.
Gradients that a captured update takes at once stay in the scratch pool; those that wait (for more
microbatches, or for an update that is not captured) have one fixed place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pdmpi.errors import PdmpiError
from pdmpi.graph import Ref
from pdmpi.model.generator import device_state, draws_by_cudnn
from pdmpi.model.tree import map_tree, tensors_of
from pdmpi.runtime.capture import Capturer, Draws, Replayable
from pdmpi.runtime.feed import Batch
from pdmpi.runtime.passes import Pass, passes_of
from pdmpi.runtime.player import Criterion, Player
from pdmpi.runtime.waiting import WaitingGradients
from pdmpi.schedule.program import NO_SLOT

__all__ = ["GraphedPlayer", "can_capture"]

_MOST_GRAPHED = 256
"""Sets of slots to capture at most; a program that has more (very deep pipelines) is partly eager."""


def can_capture(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether a step of an optimizer keeps all its state on the device."""
    if optimizer is None or isinstance(optimizer, torch.optim.SGD):
        return True
    return all(group.get("capturable", False) for group in optimizer.param_groups)


@dataclass(frozen=True, slots=True)
class _Graphs:
    """The graphs of one pass; ``loss`` and ``gradients`` are where they leave those.

    Of a backward in two parts ``backward`` is the second one.
    """

    forward: Replayable
    recompute: Replayable | None
    backward_input: Replayable | None
    backward: Replayable
    update: Replayable | None
    loss: Tensor | None
    gradients: tuple[tuple[nn.Parameter, Tensor], ...]


class _CaptureError(Exception):
    """A stage does what a graph cannot."""


class GraphedPlayer(Player):
    """A `Player` that captures and replays; it plays eagerly what it cannot capture.

    Parameters
    ----------
    capturer
        Shared by the rank's stages.
    graph_updates
        Whether updates are captured too: nothing about them may change from one to the next.
    insist
        Raise, rather than go on eagerly, when a capture fails.
    """

    def __init__(
        self, *args: Any, capturer: Capturer, graph_updates: bool, insist: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._capturer = capturer
        self._graph_updates = graph_updates and can_capture(self.weights.optimizer)
        self._insist = insist
        keys = self.module.seeds(0)
        self._draws: Draws | None = capturer.draws(keys) if keys else None
        self._pools: dict[int, Any] = {}
        self._graphs: dict[Pass, _Graphs] = {}
        self._static: dict[int, Batch] = {}
        self._waiting = WaitingGradients(list(self.weights.parameters.values()))
        self._passes: Mapping[int, Pass] = {}
        self._accumulates = False
        self._playing: dict[int, _Graphs] = {}
        self._trained: tuple[nn.Parameter, ...] | None = None
        self._arms = False
        self._last: _Graphs | None = None
        if draws_by_cudnn(self.module):
            self._give_up("dropout between the layers of an LSTM draws from a state of cuDNN's own")

    @property
    def num_graphed(self) -> int:
        """Sets of slots that are captured."""
        return len(self._graphs)

    def close(self) -> None:
        """Give up the graphs: a communicator of NCCL whose sums they hold ends only after them."""
        self._graphs.clear()
        self._playing.clear()
        self._pools.clear()
        self._static.clear()
        self._last = None

    def trained_by(self, criterion: Criterion) -> Criterion:
        """Watch what the loss does."""
        return partial(self._watched, criterion)

    def _watched(self, criterion: Criterion, outputs: Mapping[Ref, Tensor], target: Any, k: int) -> Tensor:
        """Return a loss, and, before anything is captured, see whether it draws random numbers."""
        if self._trained is not None or self.why_eager:
            return criterion(outputs, target, k)
        before = device_state()
        loss = criterion(outputs, target, k)
        after = device_state()
        if before is not None and after is not None and not torch.equal(before, after):
            self._give_up("the loss draws random numbers")
        return loss

    def follow(self, rows: Sequence[Sequence[int]], stage: int) -> None:
        """Read which slots each microbatch of the program that follows will use."""
        self._passes = passes_of(rows, stage)
        self._accumulates = any(not one.opens for one in self._passes.values())
        self._last = None

    def forward(self, k: int, version: int, weights: int, inputs: int, output: int, saved: int) -> None:
        """Run the stage forward and fill its output slot."""
        one = self._pass_of(k)
        if one is None:
            super().forward(k, version, weights, inputs, output, saved)
            return
        batch = Batch({}, None) if self._feed is None else self._feed(k)
        graphs = self._place(inputs, batch) and self._graphs_of(one, k, version)
        if not graphs:
            self._fed[k] = batch
            self.compute_forward(k, version, weights, inputs, output, saved)
            return
        self._start_draws(k)
        graphs.forward.replay()
        if graphs.loss is not None:
            self.losses[k] = graphs.loss.clone()
        self._playing[k] = graphs

    def recompute(self, k: int, version: int, weights: int, inputs: int, saved: int) -> None:
        """Run the stage forward again."""
        if k in self._playing:
            again = self._playing[k].recompute
            assert again is not None
            self._start_draws(k)
            again.replay()
        else:
            super().recompute(k, version, weights, inputs, saved)

    def backward(self, k: int, version: int, weights: int, saved: int, grad_in: int, grad_out: int) -> None:
        """Accumulate the parameters' gradients and fill the slot of gradients for earlier stages."""
        if self._replays(k):
            self._used.append(version)
        else:
            with self._collected(k, opens=True):
                super().backward(k, version, weights, saved, grad_in, grad_out)

    def backward_input(
        self, k: int, version: int, weights: int, saved: int, grad_in: int, grad_out: int
    ) -> None:
        """Fill the slot of gradients for earlier stages; leave the parameters' gradients for later."""
        if k in self._playing:
            first = self._playing[k].backward_input
            assert first is not None
            first.replay()
            self._used.append(version)
        else:
            with self._collected(k, opens=True):
                super().backward_input(k, version, weights, saved, grad_in, grad_out)

    def backward_weight(self, k: int, weights: int, saved: int) -> None:
        """Accumulate the parameters' gradients that `backward_input` left."""
        if not self._replays(k):
            with self._collected(k, opens=False):
                super().backward_weight(k, weights, saved)

    def _replays(self, k: int) -> bool:
        """Replay what leaves the parameters' gradients, if graphs play the microbatch; say whether."""
        graphs = self._last = self._playing.pop(k, None)
        if graphs is not None:
            graphs.backward.replay()
            for parameter, gradient in graphs.gradients:
                parameter.grad = gradient
        elif self._arms:
            super().arm_reduce()
        self._arms = False
        return graphs is not None

    def _collected(self, k: int, *, opens: bool) -> AbstractContextManager[None]:
        """Let gradients of a backward that is launched wait where graphs add to them.

        ``opens`` is for its first part, where it comes in two.
        """
        one = self._passes.get(k)
        if one is None or not self._keeps_gradients(one) or (self.why_eager and not self._playing):
            return nullcontext()
        return self._waiting.collected(opens=opens and one.opens)

    def arm_reduce(self) -> None:
        """Let gradients leave for their sum as the next backward finishes them."""
        self._arms = True

    def wait_reduce(self) -> None:
        """Wait for the sums; a graph of a backward contains its own."""
        if self._last is None:
            super().wait_reduce()

    def update(self, version: int, read: int, write: int) -> None:
        """One optimizer step from a weight slot to another, which makes ``version``."""
        if self._last is not None and self._last.update is not None:
            self._last.update.replay()
            self.weights.stand_at(write)
            if self._accumulates:  # or a backward that is launched would add to them
                self._waiting.forget()
            self._note_lags(version)
            return
        if self._limit is None:
            self._note_trained()
        super().update(version, read, write)
        if self.why_eager and not self._playing:
            self._waiting.release()
            self.close()

    def gather(self) -> list[Tensor]:
        """Return the gradients of the update that follows."""
        self._note_trained()
        return super().gather()

    def _note_trained(self) -> None:
        """Note, once, which parameters get a gradient, before the optimizer makes what it keeps of them.

        What activations have left is given back first: that state would lie scattered over it, and hold it.
        """
        if self._trained is None:
            gradients = {p: p.grad for p in self.weights.parameters.values() if p.grad is not None}
            self._trained = tuple(gradients)
            if any(gradient.layout != torch.strided for gradient in gradients.values()):
                self._give_up("a gradient is sparse")
            self._capturer.settle()

    def _start_draws(self, k: int) -> None:
        """Let the graph of a forward that follows draw what this microbatch draws."""
        if self._draws is not None:
            self._draws.start(self.module.seeds(self._first + k))

    def _pass_of(self, k: int) -> Pass | None:
        """Return the pass of a microbatch if graphs play it."""
        return None if self._trained is None or self.why_eager else self._passes.get(k)

    def _place(self, inputs: int, batch: Batch) -> bool:
        """Copy what was fed to where the graphs of an input slot read it; say whether it fits."""
        held = self._static.get(inputs)
        if held is None:
            held = self._static[inputs] = Batch(*map_tree(_like, (dict(batch.inputs), batch.target)))
        fixed, given = _tensors_of(held), _tensors_of(batch)
        if [(t.shape, t.dtype) for t in fixed] != [(t.shape, t.dtype) for t in given]:
            self._give_up("the shapes of its data change")
            return False
        for target, source in zip(fixed, given, strict=True):
            target.copy_(source, non_blocking=True)
        return True

    def _graphs_of(self, one: Pass, k: int, version: int) -> _Graphs | None:
        if one not in self._graphs:
            if len(self._graphs) >= _MOST_GRAPHED:
                self.why_partly = f"the program uses more than {_MOST_GRAPHED} sets of slots"
                return None
            try:
                self._graphs[one] = self._captured(one, k, version)
            except (RuntimeError, _CaptureError) as error:
                self._give_up(str(error).strip().splitlines()[0])
                return None
        return self._graphs[one]

    def _give_up(self, why: str) -> None:
        self.why_eager = why
        if self._insist:
            raise PdmpiError(f"[runtime] cuda_graphs: {why}; set it to false")

    def _captured(self, one: Pass, k: int, version: int) -> _Graphs:
        """Capture what a microbatch does, while its slots are free but for what was received."""
        self._capturer.settle()  # the eager microbatches before have left memory that the pools need
        weights, inputs, output, saved = one.forward
        _, kept, grad_in, grad_out = one.backward
        if kept not in self._pools:
            self._pools[kept] = self._capturer.new_pool()
        slot, scratch, capture = self._pools[kept], self._capturer.scratch, self._capturer.capture
        if self._keeps_gradients(one) or not one.opens:
            self._waiting.reserve()  # before a capture, whose memory it would else be part of
        drawing = nullcontext() if self._draws is None else self.module.drawing(self._draws.draw)
        with self._undone(one, k), drawing:
            self._fed[k] = self._static[inputs]
            forward = capture(
                scratch if saved == NO_SLOT else slot,
                lambda: self.compute_forward(k, version, weights, inputs, output, saved),
                self._draws,
            )
            loss = self.losses.get(k)
            again = first = update = None
            if one.recomputes:
                again = capture(
                    slot, lambda: Player.recompute(self, k, version, weights, inputs, kept), self._draws
                )
            slots = (weights, kept, grad_in, grad_out)
            if one.splits:
                first = capture(slot, lambda: self._input_part(k, version, *slots))
            backward = capture(scratch, lambda: self._parameter_part(one, k, version, *slots))
            gradients = tuple((p, p.grad) for p in self._trained or () if p.grad is not None)
            if self._graph_updates and one.update:
                read, write = one.update
                update = capture(scratch, lambda: self.weights.update(read, write, self._scale))
                gradients = ()
        kept_loss = loss if isinstance(loss, Tensor) else None
        return _Graphs(forward, again, first, backward, update, kept_loss, gradients)

    def _input_part(self, k: int, version: int, *slots: int) -> None:
        """Run the first part of a backward in two."""
        super().backward_input(k, version, *slots)
        split = self._saved[slots[1]].split
        if split is None or split.is_whole:
            raise _CaptureError("a parameter that is used twice keeps its backward from being split")

    def _parameter_part(self, one: Pass, k: int, version: int, *slots: int) -> None:
        """Run a backward, or its second part, that leaves the gradients where the update finds them."""
        trained, keeps = set(self._trained or ()), self._keeps_gradients(one)
        if keeps or not one.opens:
            self._waiting.expect(trained, opens=one.opens, at_once=keeps)
        else:
            self._waiting.forget()
        if one.reduces:
            super().arm_reduce()
        if one.splits:
            super().backward_weight(k, *slots[:2])
        else:
            super().backward(k, version, *slots)
        if {p for p in self.weights.parameters.values() if p.grad is not None} != trained:
            raise _CaptureError("the set of parameters that get a gradient changes")
        if one.reduces:
            super().wait_reduce()
        elif keeps and not self._waiting.add():
            raise _CaptureError("a gradient is not added in place")

    def _keeps_gradients(self, one: Pass) -> bool:
        """Whether gradients wait in a fixed place after the backward."""
        return not one.reduces and (self._accumulates or not (self._graph_updates and one.update))

    @contextmanager
    def _undone(self, one: Pass, k: int) -> Iterator[None]:
        """Leave the books as if nothing had been played, which is so: a capture runs nothing."""
        parameters = list(self.weights.parameters.values())
        held = [p.grad for p in parameters]
        used, newest, fed = list(self._used), self.weights.newest, self._fed.pop(k, None)
        try:
            yield
        except BaseException:
            if self._reducer is not None:
                self._reducer.reset()
            raise
        finally:
            self._used[:] = used
            self._saved.pop(one.backward[1], None)
            self.losses.pop(k, None)
            self._fed.pop(k, None)
            if fed is not None:
                self._fed[k] = fed
            self.weights.stand_at(newest)
            for parameter, gradient in zip(parameters, held, strict=True):
                parameter.grad = gradient


def _like(leaf: Any) -> Any:
    return torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf


def _tensors_of(batch: Batch) -> list[Tensor]:
    return tensors_of((dict(batch.inputs), batch.target))
