"""CUDA graphs: launches that are recorded once and repeated as one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch

__all__ = ["Capturer", "CudaCapturer", "Replayable"]


class Replayable(Protocol):
    """Work that was recorded."""

    def replay(self) -> None:
        """Run it once more, on the same addresses."""


class Capturer(Protocol):
    """What records the work of one rank."""

    scratch: Any
    """Pool of memory that no work needs once it has run."""

    def new_pool(self) -> Any:
        """Return a pool of memory for works that are never alive together."""

    def settle(self) -> None:
        """Wait for all that runs, and make room for new pools."""

    def capture(self, pool: Any, work: Callable[[], None]) -> Replayable:
        """Record what ``work`` does, without doing it."""


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

    def capture(self, pool: Any, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Return the graph of what ``work`` launches; other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        return graph
