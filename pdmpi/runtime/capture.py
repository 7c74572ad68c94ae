"""CUDA graphs: launches that are recorded once and repeated as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import torch

from pdmpi.model.generator import CapturedDraws, generator_aside

__all__ = ["Capturer", "CudaCapturer", "Draws", "Replayable"]


class Replayable(Protocol):
    """Work that was recorded."""

    def replay(self) -> None:
        """Run it once more, on the same addresses."""


class Draws(Protocol):
    """Random numbers in what is recorded."""

    def attach(self, graph: Any) -> None:
        """Take part in a recording that begins."""

    def draw(self, key: str, seed: int, call: Callable[[], Any]) -> None:
        """Run a call that draws, while it is recorded; see `pdmpi.model.generator.Draw`."""

    def start(self, seeds: Mapping[str, int]) -> None:
        """Set the seeds, by key, of what is run next."""


class Capturer(Protocol):
    """What records the work of one rank."""

    scratch: Any
    """Pool of memory that no work needs once it has run."""

    def new_pool(self) -> Any:
        """Return a pool of memory for works that are never alive together."""

    def settle(self) -> None:
        """Wait for all that runs, and make room for new pools."""

    def draws(self, keys: Iterable[str]) -> Draws:
        """Return random numbers for works that draw under these keys."""

    def capture(self, pool: Any, work: Callable[[], None], draws: Draws | None = None) -> Replayable:
        """Record what ``work`` does, without doing it; ``draws`` is for what it draws."""


class CudaCapturer:
    """Records what is launched on the current stream, which must not be the default one."""

    def __init__(self) -> None:
        self.scratch: Any = self.new_pool()

    def new_pool(self) -> Any:
        """Return a memory pool of the caching allocator."""
        return torch.cuda.graph_pool_handle()

    def settle(self) -> None:
        """Wait for the device and give cached memory back."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def draws(self, keys: Iterable[str]) -> CapturedDraws:
        """Return random streams of the current device."""
        return CapturedDraws(keys)

    def capture(
        self, pool: Any, work: Callable[[], None], draws: Draws | None = None
    ) -> torch.cuda.CUDAGraph:
        """Return the graph of what ``work`` launches; other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        if draws is not None:
            draws.attach(graph)
        with generator_aside():
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph
