"""Torch's default generator, which a process has one of, used by one thread at a time.

Ranks may be threads (the ``local`` transport) of one process, whose draws take turns; each draws as if it
were alone.  Draws that a CUDA graph holds, of a rank that has the process for itself, start at every replay
from seeds set before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

__all__ = [
    "CapturedDraws", "Draw", "device_state", "draws_by_cudnn", "generator_aside", "run_seeded",
    "run_seeded_aside",
]  # fmt: skip

_Result = TypeVar("_Result")


class Draw(Protocol):
    """How a stage runs a call that draws random numbers."""

    def __call__(self, key: str, seed: int, call: Callable[[], Any], /) -> None:
        """Run ``call``, the one of this key in a stage, with the numbers of ``seed``."""


_IN_USE = threading.RLock()


def run_seeded(key: str, seed: int, call: Callable[[], Any]) -> None:
    """Run ``call`` with the default generators starting from ``seed``; a `Draw`."""
    with _IN_USE:
        # What ``torch.manual_seed`` does, without its 0.2 ms where only the CPU is used.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
        call()


def run_seeded_aside(seed: int, call: Callable[[], _Result]) -> _Result:
    """Do the same on the CPU alone, and leave its generator as it was."""
    with _IN_USE:
        before = torch.default_generator.get_state()
        try:
            torch.default_generator.manual_seed(seed)
            return call()
        finally:
            torch.default_generator.set_state(before)


def device_state() -> Tensor | None:
    """Return the state of the current device's generator, where CUDA is in use; waits for nothing."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.get_rng_state()


def draws_by_cudnn(module: nn.Module) -> bool:
    """Whether there are recurrent layers with dropout between them: cuDNN draws from a state of its own."""
    return any(isinstance(m, nn.RNNBase) and m.dropout > 0 and m.num_layers > 1 for m in module.modules())


def _device_generator() -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device()]


@contextmanager
def _drawing_from(stream: torch.Generator) -> Iterator[None]:
    """Let the current device's generator continue another stream meanwhile."""
    default = _device_generator()
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(stream)
    try:
        yield
    finally:
        default.graphsafe_set_state(before)


@contextmanager
def generator_aside() -> Iterator[None]:
    """Let the current device's generator be a copy of itself, for a capture.

    A capture that fails leaves the generator that it saw unfit for draws outside of captures.

    Raises
    ------
    RuntimeError
        If what is captured draws on the host, whose numbers a graph would keep for ever.
    """
    host = torch.default_generator.get_state()
    with _drawing_from(_device_generator().clone_state()):
        yield
    if not torch.equal(torch.default_generator.get_state(), host):
        raise RuntimeError("it draws random numbers on the host")


class CapturedDraws:
    """Random numbers inside CUDA graphs: a stream for each draw, which every replay starts anew.

    Philox, the device's generator, gives for a seed the same numbers in a graph as outside of one.

    Parameters
    ----------
    keys
        Of the draws.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._streams = {key: _device_generator().clone_state() for key in keys}

    def attach(self, graph: torch.cuda.CUDAGraph) -> None:
        """Let a graph that is captured next read the streams."""
        for stream in self._streams.values():
            graph.register_generator_state(stream)

    def draw(self, key: str, seed: int, call: Callable[[], Any]) -> None:
        """Run a call while it is captured."""
        with _drawing_from(self._streams[key]):
            call()

    def start(self, seeds: Mapping[str, int]) -> None:
        """Set the seeds of the replay that follows."""
        for key, seed in seeds.items():
            self._streams[key].manual_seed(seed)
