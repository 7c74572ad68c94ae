"""One training step, layer by layer, with a clock between the layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pdmpi.graph import Ref
from pdmpi.graph.graph import INPUT
from pdmpi.model.generator import CapturedDraws, draws_by_cudnn, generator_aside
from pdmpi.model.joints import Arrivals, Joints
from pdmpi.model.stage import StageModule
from pdmpi.model.trace import TracedModel

_T = TypeVar("_T")

__all__ = ["Clock", "LayerSample", "SavedBytes", "Step", "torch_threads"]


class Clock:
    """Marks on the device's own time line, read when all work is done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"

    def mark(self) -> Any:
        """Return a mark for now; inside a capture, one that every replay sets anew."""
        if not self.on_cuda:
            return time.perf_counter()
        captured = torch.cuda.is_current_stream_capturing()
        event = torch.cuda.Event(enable_timing=True, external=captured)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def finish(self) -> None:
        """Wait until all work is done."""
        if self.on_cuda:
            torch.cuda.synchronize()

    def captured(self, work: Callable[[], _T], draws: CapturedDraws | None = None) -> Callable[[], _T] | None:
        """Return what replays a CUDA graph of some work; it returns what the work did at its capture.

        None off a GPU, and for what a graph cannot hold.  ``draws`` is for what the work draws.
        """
        if not self.on_cuda:
            return None
        graph = torch.cuda.CUDAGraph()
        if draws is not None:
            draws.attach(graph)
        try:
            torch.cuda.synchronize()
            stream = torch.cuda.current_stream()
            with (
                generator_aside(),
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                found = work()
        except RuntimeError:
            torch.cuda.synchronize()
            return None

        def replay() -> _T:
            graph.replay()
            return found

        return replay

    def between(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks; call `finish` first."""
        return float(start.elapsed_time(end)) / 1e3 if self.on_cuda else float(end - start)


@dataclass
class LayerSample:
    """Repeated measurements of one layer, seconds and bytes."""

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    saved_bytes: int = 0
    workspace_bytes: int = 0
    forward_workspace_bytes: int = 0
    split_bytes: int = 0


class SavedBytes:
    """Counts what autograd keeps from forward to backward, each piece of memory once.

    A value that several layers keep (the output of one, the input of the next) counts for
    the first that keeps it; parameters and buffers do not count.

    Parameters
    ----------
    traced
        Tells which values share memory.
    """

    def __init__(self, traced: TracedModel) -> None:
        self._traced = traced
        self._counted: set[int] = set()

    def run(
        self, stage: StageModule, inputs: Mapping[Ref, Tensor], microbatch: int
    ) -> tuple[dict[Ref, Tensor], int, list[torch.UntypedStorage]]:
        """Run a stage; return its outputs, the bytes that it alone keeps, and all memory that it keeps."""
        with _kept() as kept:
            outputs = stage(inputs, microbatch)
        everything = _storages(kept)
        for held in (*stage.parameters(), *stage.buffers()):
            kept.pop(_memory(held), None)
        return outputs, self._own_bytes(kept, {**outputs, **inputs}), everything

    def loss(
        self, criterion: Callable[[Mapping[Ref, Tensor]], Tensor], outputs: Mapping[Ref, Tensor]
    ) -> tuple[Tensor, int, list[torch.UntypedStorage]]:
        """Return the loss of the model's outputs, the bytes it keeps beside them, and all memory it keeps."""
        with _kept() as kept:
            loss = criterion(outputs)
        everything = _storages(kept)
        return loss, self._own_bytes(kept, outputs), everything

    def others(self, values: Mapping[Ref, Tensor]) -> int:
        """Return the bytes of those values that nothing has kept yet."""
        sizes = {self._storage(ref): tensor.untyped_storage().nbytes() for ref, tensor in values.items()}
        return sum(size for storage, size in sizes.items() if storage not in self._counted)

    def _storage(self, ref: Ref) -> int:
        return self._traced.recording.facts[self._traced.value_of[ref].number].storage

    def _own_bytes(self, kept: dict[int, Tensor], values: Mapping[Ref, Tensor]) -> int:
        """Return the bytes of what was kept, without values that count already."""
        total = 0
        for ref, tensor in values.items():
            shared = self._storage(ref)
            found = kept.pop(_memory(tensor), None)
            if found is not None and shared not in self._counted:
                self._counted.add(shared)
                total += found.untyped_storage().nbytes()
        return total + sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@dataclass
class _Allocated:
    """Bytes on the device before, at most during, and after something."""

    before: int = 0
    peak: int = 0
    after: int = 0


@dataclass
class _Run:
    inputs: dict[Ref, Tensor]
    outputs: dict[Ref, Tensor]


@dataclass
class _Marks:
    """Start and end of every layer's forward and backward, and of the loss's where there is one."""

    forward: dict[str, tuple[Any, Any]]
    backward: dict[str, tuple[Any, Any]]
    loss: tuple[tuple[Any, Any], tuple[Any, Any]] | None


class Step:
    """Forward through a few consecutive layers, and backward again.

    Parameters
    ----------
    traced
        The model.
    stages
        One stage for each layer, in order.
    values
        What the layers before have left.
    criterion
        From the model's outputs to the loss, when the last layer is among these; its time
        counts for that layer.
    clock
        Of the device.
    precision
        Makes what forwards and the loss run in, as in training.
    """

    def __init__(
        self,
        traced: TracedModel,
        stages: Mapping[str, StageModule],
        values: Mapping[Ref, Tensor],
        criterion: Any,
        clock: Clock,
        *,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.samples = {name: LayerSample() for name in stages}
        self.values: dict[Ref, Tensor] = dict(values)
        self._traced = traced
        self._stages = stages
        self._before = dict(values)
        self._criterion = criterion
        self._clock = clock
        self._precision = precision
        self._grads: dict[Ref, Tensor] = {}
        self._replayed: Callable[[], _Marks] | None = None

    def warm_up(self, saved: SavedBytes, *, graphs: bool) -> None:
        """Run once untimed, counting bytes.

        With graphs, what a backward allocates is counted beside all that was saved for it: it does not lie
        where something saved is no longer needed.
        """
        runs, held = {}, {}
        self.values = dict(self._before)
        for name, stage in self._stages.items():
            inputs, live = self._inputs(stage), self._live_bytes(name, saved)
            with self._precision(), self._counting() as found:
                outputs, kept, held[name] = saved.run(stage, inputs, 0)
            if not graphs:
                held[name].clear()
            self.samples[name].saved_bytes = kept
            self._note(name, found, forward_bytes=live - kept)
            runs[name] = self._keep(inputs, outputs)
        if self._criterion is not None:
            self._warm_up_loss(saved, list(self._stages)[-1], graphs)
        for name in reversed(list(runs)):
            gradients = sum(p.nbytes for p in self._stages[name].parameters() if p.requires_grad)
            with self._counting() as found:
                self.samples[name].split_bytes = _watched_backward_of(runs.pop(name), self._grads)
            del held[name]
            self._note(name, found, gradients, self._traced.graph.gradient_bytes_over(name))

    def _warm_up_loss(self, saved: SavedBytes, last: str, graphs: bool) -> None:
        """Count what the loss keeps and allocates for the layer that it counts for."""
        live, outputs = self._live_bytes("", saved), self._outputs()
        with self._precision(), self._counting() as found:
            loss, kept, held = saved.loss(self._loss_of, outputs)
        self.samples[last].saved_bytes += kept
        self._note(last, found, forward_bytes=live - kept)
        if not graphs:
            held.clear()
        if loss.requires_grad:
            with self._counting() as found:
                loss.backward()  # type: ignore[no-untyped-call]
            waiting = sum(t.grad.nbytes for t in outputs.values() if t.grad is not None)
            self._note(last, found, waiting_bytes=waiting if graphs else 0)

    def _live_bytes(self, name: str, saved: SavedBytes) -> int:
        """Return the bytes of values that a layer, or one behind it, reads and that autograd has not saved.

        ``name`` is empty for the loss.  Inputs of the model are in no layer's memory.  0 off a GPU, where
        nothing is noted.
        """
        if not self._clock.on_cuda:
            return 0
        graph = self._traced.graph
        later = graph.layers[graph.index[name] :] if name else ()
        wanted = {ref for layer in later for ref in layer.inputs} | set(graph.outputs)
        return saved.others({
            ref: tensor
            for ref, tensor in self.values.items()
            if ref in wanted and graph.layers[graph.index[ref.layer]].kind != INPUT
        })  # fmt: skip

    @contextmanager
    def _counting(self) -> Iterator[_Allocated]:
        """Note the memory before, at most during, and after something runs."""
        found = _Allocated()
        if not self._clock.on_cuda:
            yield found
            return
        torch.cuda.reset_peak_memory_stats()
        found.before = torch.cuda.memory_allocated()
        yield found
        found.peak, found.after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()

    def _note(
        self,
        name: str,
        found: _Allocated,
        counted_bytes: int = 0,
        waiting_bytes: int = 0,
        forward_bytes: int | None = None,
    ) -> None:
        """Keep the most that there is while something of a layer runs, beyond what it leaves.

        ``counted_bytes`` of what it makes count elsewhere; ``waiting_bytes`` are there in training, too.
        ``forward_bytes`` are added to what a forward makes.
        """
        if not self._clock.on_cuda:
            return
        sample = self.samples[name]
        beyond = found.peak - max(found.before + counted_bytes, found.after) + waiting_bytes
        sample.workspace_bytes = max(sample.workspace_bytes, beyond)
        if forward_bytes is not None:
            forward = found.peak - found.before + forward_bytes
            sample.forward_workspace_bytes = max(sample.forward_workspace_bytes, forward)

    def capture(self) -> None:
        """On a GPU, let the runs that follow be replays of a CUDA graph, as training's are.

        What a graph cannot hold (a wait for the device) stays launched one by one.
        """
        if not self._clock.on_cuda or any(map(draws_by_cudnn, self._stages.values())):
            return
        keys = [key for stage in self._stages.values() for key in stage.seeds(0)]
        draws = CapturedDraws(keys) if keys else None
        with ExitStack() as drawing:
            if draws is not None:
                for stage in self._stages.values():
                    drawing.enter_context(stage.drawing(draws.draw))
            self._replayed = self._clock.captured(self._launch, draws)

    @property
    def is_captured(self) -> bool:
        """Whether runs are replays."""
        return self._replayed is not None

    def run(self) -> None:
        """Run once and add one sample to each layer."""
        marks = self._launch() if self._replayed is None else self._replayed()
        self._clock.finish()
        between = self._clock.between
        for name, sample in self.samples.items():
            sample.forward_s.append(between(*marks.forward[name]))
            sample.backward_s.append(between(*marks.backward[name]))
        if marks.loss is not None:
            last = self.samples[list(self._stages)[-1]]
            last.forward_s[-1] += between(*marks.loss[0])
            last.backward_s[-1] += between(*marks.loss[1])

    def _launch(self) -> _Marks:
        clock, runs = self._clock, {}
        forward: dict[str, tuple[Any, Any]] = {}
        self.values = dict(self._before)
        if clock.on_cuda:  # gradients are made, not added to, as in a step with one microbatch
            for stage in self._stages.values():
                stage.zero_grad(set_to_none=True)
        for name, stage in self._stages.items():
            inputs = self._inputs(stage)
            start = clock.mark()
            with self._precision():
                outputs = stage(inputs, 0)
            forward[name] = start, clock.mark()
            runs[name] = self._keep(inputs, outputs)
        loss = self._loss()
        return _Marks(forward, self._backward(runs), loss)

    def _inputs(self, stage: StageModule) -> dict[Ref, Tensor]:
        graph = self._traced.graph
        return {
            ref: self.values[ref].detach().requires_grad_(graph.spec(ref).requires_grad)
            for ref in stage.inputs
        }

    def _keep(self, inputs: dict[Ref, Tensor], outputs: dict[Ref, Tensor]) -> _Run:
        for ref, tensor in outputs.items():
            self.values[ref] = tensor.detach()
            if tensor.requires_grad and ref not in self._grads:
                self._grads[ref] = torch.randn_like(tensor)
        return _Run(inputs, outputs)

    def _backward(self, runs: dict[str, _Run]) -> dict[str, tuple[Any, Any]]:
        marks = {}
        for name in reversed(list(runs)):
            run = runs.pop(name)
            start = self._clock.mark()
            _backward_of(run, self._grads)
            marks[name] = start, self._clock.mark()
        return marks

    def _loss(self) -> tuple[tuple[Any, Any], tuple[Any, Any]] | None:
        """Run the loss on the model's outputs, if there is one; return the marks of its two directions."""
        if self._criterion is None:
            return None
        outputs = self._outputs()
        start = self._clock.mark()
        with self._precision():
            loss = self._loss_of(outputs)
        middle = self._clock.mark()
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        return (start, middle), (middle, self._clock.mark())

    def _outputs(self) -> dict[Ref, Tensor]:
        """Return the model's outputs, for the loss to start from."""
        graph = self._traced.graph
        return {
            ref: self.values[ref].detach().requires_grad_(graph.spec(ref).requires_grad)
            for ref in graph.outputs
        }

    def _loss_of(self, outputs: Mapping[Ref, Tensor]) -> Tensor:
        loss: Tensor = self._criterion(self._traced.unflatten(outputs))
        return loss


def _backward_of(run: _Run, gradients: Mapping[Ref, Tensor]) -> None:
    """Run one layer backward."""
    roots = {ref: t for ref, t in run.outputs.items() if t.requires_grad}
    if roots:
        torch.autograd.backward(list(roots.values()), [gradients[ref] for ref in roots])


def _watched_backward_of(run: _Run, gradients: Mapping[Ref, Tensor]) -> int:
    """Run one layer backward; return the bytes that arrive where its parameters' gradients begin.

    Memory that arrives at several places counts once; it is not held, which would change what there is.
    """
    seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def see(_: object, arrived: Arrivals) -> None:
        for storage in (t.untyped_storage() for t in arrived if t is not None):
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            seen[reference.cdata] = reference, storage.nbytes()

    joints = Joints(list(run.outputs.values()), [t for t in run.inputs.values() if t.requires_grad])
    with joints.watched(see):
        _backward_of(run, gradients)
    return sum(nbytes for _, nbytes in seen.values())


@contextmanager
def _kept() -> Iterator[dict[int, Tensor]]:
    """Collect what autograd keeps, by its memory."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(_memory(tensor), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def _storages(kept: Mapping[int, Tensor]) -> list[torch.UntypedStorage]:
    """Return the memory of what was collected: the tensors would keep their gradients."""
    return [tensor.untyped_storage() for tensor in kept.values()]


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr()) or id(tensor)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let each of PyTorch's operators use so many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
