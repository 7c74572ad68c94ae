"""What each layer costs: time, bytes moved, bytes kept.

Layers are measured one after the other as a training step runs them, forward in order and
then backward in reverse, so that caches are as they will be.  A model that would not fit
into memory is measured in runs of consecutive layers.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pdmpi import __version__
from pdmpi.config.run import ModelConfig, RunConfig
from pdmpi.errors import InputError
from pdmpi.graph import Layer, Ref
from pdmpi.graph.graph import INPUT
from pdmpi.model.build import build_stage
from pdmpi.model.compiled import no_compiler_for
from pdmpi.model.compiled_costs import shared_out
from pdmpi.model.example import cast_floating, dtype_of, example_batch, microbatch_size
from pdmpi.model.factory import load_factory
from pdmpi.model.precision import autocasting
from pdmpi.model.timing import Clock, LayerSample, SavedBytes, Step, torch_threads
from pdmpi.model.trace import TracedModel, trace_model
from pdmpi.plan.profile import CUDA_GRAPHS, LayerCost, Profile

__all__ = ["UpdateCosts", "machine_facts", "profile_model"]

_WARM_UP = 2
_FEWEST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCosts:
    """What an update costs for each byte of parameters.

    Attributes
    ----------
    state_factor
        Bytes of the optimizer's state, float32 masters included.
    update_s, accumulate_s
        Seconds of an update, and of adding gradients to those of another microbatch.
    """

    state_factor: float
    update_s: float
    accumulate_s: float


def profile_model(
    config: RunConfig,
    update_costs: Callable[[RunConfig, Clock, torch.device, int], UpdateCosts],
    *,
    device: torch.device | str = "cpu",
    repeats: int = 20,
    budget_s: float = 20.0,
    memory_bytes: int | None = None,
    tell: Callable[[int, int, str], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> Profile:
    """Trace the model of a configuration and measure every layer.

    Parameters
    ----------
    config
        The run; its microbatch is what is measured, with its number of threads.
    update_costs
        Measures an update of parameters of so many bytes; the runtime's part, since it makes them.
    device
        Where to measure.
    repeats
        Timed repetitions at most, after two that warm up; the median counts.
    budget_s
        Seconds after which fewer repetitions (three at least) have to do.
    memory_bytes
        Bytes to measure within; half of what is free by default.
    tell
        Called with (layers done, layers, name) as it goes on.
    note
        Called with what the user may want to know of the model (see `TracedModel.remarks`).

    Raises
    ------
    InputError
        For a model, data set, loss or optimizer that cannot be used, with the reason.
    """
    place, dtype = torch.device(device), dtype_of(config)
    source, target = example_batch(config)
    traced = trace_model(config.model, source, seed=config.train.seed, dtype=dtype)
    if note is not None:
        for remark in traced.remarks():
            note(remark)
    layers = [layer for layer in traced.graph.layers if layer.kind != INPUT]
    if not any(layer.parameters for layer in layers):
        raise InputError(
            f"[model] factory {config.model.factory!r} has no parameters; there is nothing to train"
        )
    if config.runtime.compile and (why := no_compiler_for(place)):
        raise InputError(f"[runtime] compile = true, but {why}; set it to false")
    loss = load_factory(config.loss.factory)(**config.loss.args)
    target = cast_floating(target, dtype, place)
    values = traced.flatten(cast_floating(source, dtype, place))
    arriving = _arriving_bytes(traced.flatten(source), values) if place.type == "cuda" else {}
    samples: dict[str, LayerSample] = {}
    wholes: list[tuple[list[Layer], LayerSample]] = []
    graphed = True
    saved, clock, done = SavedBytes(traced), Clock(place), 0
    _library_bytes(place)  # of what ran in this process before
    room = _free_bytes(place) // 2 if memory_bytes is None else memory_bytes
    with torch_threads(config.train.threads), _own_stream(place):
        for chunk in _chunks(traced, layers, room):
            stepped = partial(
                _stepped,
                config,
                traced,
                values,
                (lambda output: loss(output, target)) if chunk[-1] is layers[-1] else None,
                clock,
                repeats=repeats,
                budget_s=budget_s * len(chunk) / len(layers),
            )
            step = stepped([[layer.name] for layer in chunk], saved)
            graphed = graphed and step.is_captured
            samples.update(step.samples)
            if config.runtime.compile:
                whole = stepped([[layer.name for layer in chunk]], SavedBytes(traced), compiles=True)
                graphed = graphed and whole.is_captured
                wholes.append((chunk, whole.samples[chunk[-1].name]))
            values = _live(traced, step.values, chunk[-1])
            done += len(chunk)
            if tell is not None:
                tell(done, len(layers), chunk[-1].name)
        facts = {CUDA_GRAPHS: "yes" if graphed else "no"} if clock.on_cuda else {}
        overhead = _overhead(clock, place)
        owned = _OwnedBytes(traced)
        by_layer = {
            layer.name: _cost(layer, samples.get(layer.name), owned, overhead, arriving.get(layer.name, 0))
            for layer in traced.graph.layers
        }
        for chunk, sample in wholes:
            own = [by_layer[layer.name] for layer in chunk]
            shares = shared_out(own, _cost(chunk[-1], sample, _OwnedBytes(traced), overhead, 0))
            by_layer.update(zip([layer.name for layer in chunk], shares, strict=True))
        costs = tuple(by_layer.values())
        update = update_costs(config, clock, place, sum(cost.parameter_bytes for cost in costs))
        library_bytes = _library_bytes(place)
    return Profile(
        graph=traced.graph,
        costs=costs,
        microbatch_size=microbatch_size(config),
        optimizer_state_factor=update.state_factor,
        update_s_per_byte=update.update_s,
        accumulate_s_per_byte=update.accumulate_s,
        library_bytes=library_bytes,
        machine={**machine_facts(place, config.train.threads), **facts},
    )


def machine_facts(device: torch.device, threads: int) -> dict[str, str]:
    """Return what a reader of the profile may want to know of the machine, as text."""
    cuda = device.type == "cuda"
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "pdmpi": __version__,
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "cores": str(os.cpu_count()),
        "threads": str(threads),
    }


def _stepped(
    config: RunConfig,
    traced: TracedModel,
    values: dict[Ref, Tensor],
    criterion: Any,
    clock: Clock,
    groups: Sequence[Sequence[str]],
    saved: SavedBytes,
    *,
    repeats: int,
    budget_s: float,
    compiles: bool = False,
) -> Step:
    """Return a measured step over consecutive layers, each group of them as one, by its last layer's name."""
    device = clock.device
    stages = {
        names[-1]: build_stage(traced, names, device=device, last=False, compiles=compiles)
        for names in groups
    }
    precision = partial(autocasting, dtype_of(config), device)
    step = Step(traced, stages, values, criterion, clock, precision=precision)
    _repeat(step, saved, repeats, budget_s, graphs=bool(config.runtime.cuda_graphs))
    return step


def _repeat(step: Step, saved: SavedBytes, repeats: int, budget_s: float, graphs: bool = True) -> None:
    step.warm_up(saved, graphs=graphs)
    for _ in range(_WARM_UP - 1):
        step.run()
    if graphs:
        step.capture()
    for sample in step.samples.values():
        sample.forward_s.clear()
        sample.backward_s.clear()
    started = time.perf_counter()
    for count in range(1, repeats + 1):
        step.run()
        if count >= _FEWEST and time.perf_counter() - started > budget_s:
            return


def _arriving_bytes(given: Mapping[Ref, Tensor], cast: Mapping[Ref, Tensor]) -> dict[str, int]:
    """Return what each input takes on a GPU before it lies where the stage reads it, by its layer.

    A batch arrives as it is ``given`` and is cast there.
    """
    return {
        ref.layer: tensor.nbytes + (cast[ref].nbytes if cast[ref].dtype != tensor.dtype else 0)
        for ref, tensor in given.items()
    }


def _cost(
    layer: Layer,
    sample: LayerSample | None,
    owned: _OwnedBytes,
    overhead: tuple[float, float],
    arriving_bytes: int,
) -> LayerCost:
    output_bytes = sum(spec.nbytes for spec in layer.outputs)
    if sample is None:
        return LayerCost(
            forward_s=0.0, backward_s=0.0, output_bytes=output_bytes, buffer_bytes=arriving_bytes
        )
    parameter_bytes, buffer_bytes = owned.of(layer.name)
    return LayerCost(
        forward_s=max(0.0, statistics.median(sample.forward_s) - overhead[0]),
        backward_s=max(0.0, statistics.median(sample.backward_s) - overhead[1]),
        output_bytes=output_bytes,
        parameter_bytes=parameter_bytes,
        buffer_bytes=buffer_bytes,
        saved_bytes=sample.saved_bytes,
        workspace_bytes=sample.workspace_bytes,
        forward_workspace_bytes=sample.forward_workspace_bytes,
        split_bytes=sample.split_bytes,
    )


def empty_layers() -> nn.Sequential:
    """Return a model whose layers, but for the first, do nothing."""
    return nn.Sequential(nn.Linear(1, 1), *(nn.Flatten() for _ in range(8)))


def _overhead(clock: Clock, device: torch.device) -> tuple[float, float]:
    """Return the seconds (forward, backward) that timing a layer by itself adds to it.

    Layers of one stage share one call of autograd's engine; layers timed alone do not.
    """
    source = torch.zeros(1, 1, device=device)
    traced = trace_model(ModelConfig(factory="pdmpi.model.measure:empty_layers"), source)
    names = [layer.name for layer in traced.graph.layers if layer.kind != INPUT]
    stages = {name: build_stage(traced, [name], device=device, last=False) for name in names}
    step = Step(traced, stages, traced.flatten(source), None, clock)
    _repeat(step, SavedBytes(traced), repeats=20, budget_s=1.0)
    empty = [step.samples[name] for name in names[1:-1]]
    forward = statistics.median(s for sample in empty for s in sample.forward_s)
    return forward, statistics.median(s for sample in empty for s in sample.backward_s)


class _OwnedBytes:
    """Bytes of the tensors that each layer is the first to own."""

    def __init__(self, traced: TracedModel) -> None:
        self._traced = traced
        self._seen: set[int] = set()

    def of(self, name: str) -> tuple[int, int]:
        """Return (parameter bytes, buffer bytes); call it in the order of the layers."""
        found = [0, 0]
        for tensor in self._traced.tensors_of(name):
            if id(tensor) not in self._seen:
                self._seen.add(id(tensor))
                found[not isinstance(tensor, nn.Parameter)] += tensor.nbytes
        return found[0], found[1]


def _live(traced: TracedModel, values: dict[Ref, Tensor], last: Layer) -> dict[Ref, Tensor]:
    """Return the values that layers after ``last``, or the loss, read."""
    graph = traced.graph
    later = graph.layers[graph.index[last.name] + 1 :]
    wanted = {ref for layer in later for ref in layer.inputs} | set(graph.outputs)
    return {ref: tensor for ref, tensor in values.items() if ref in wanted}


def _chunks(traced: TracedModel, layers: list[Layer], memory_bytes: int) -> Iterator[list[Layer]]:
    """Yield runs of layers whose weights, gradients and activations fit together."""
    owned, chunk, used = _OwnedBytes(traced), list[Layer](), 0
    for layer in layers:
        need = 2 * sum(owned.of(layer.name)) + 4 * sum(spec.nbytes for spec in layer.outputs)
        if chunk and used + need > memory_bytes:
            yield chunk
            chunk, used = [], 0
        chunk.append(layer)
        used += need
    yield chunk


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _library_bytes(device: torch.device) -> int:
    """Give back what cuBLAS holds for the streams that have used it, and return what it was."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if device.type != "cuda" or clear is None:
        return 0
    before = torch.cuda.memory_allocated(device)
    clear()
    return before - torch.cuda.memory_allocated(device)


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Launch on a stream of our own: on the default one nothing can be captured."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
    stream.synchronize()
