"""Where a rank computes and what moves its messages: decided before MPI starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from pdmpi.config.run import CollectivesConfig, RunConfig, TransportConfig
from pdmpi.errors import InputError
from pdmpi.model.heap import keep_freed_memory
from pdmpi.transport.device import choose_device, load_ucx

if TYPE_CHECKING:  # importing it starts MPI
    from pdmpi.transport.mpi import MpiTransport

__all__ = ["open_on", "open_transport"]

_COMPILING = 10
"""Times that a transfer may take where a stage waits for those before it to be compiled."""


def open_transport(config: RunConfig) -> tuple[MpiTransport, torch.device, list[str]]:
    """Choose this rank's device, then start MPI, as a run's configuration says; see `open_on`."""
    runtime = config.runtime
    return open_on(
        config.train.device,
        runtime.stall_timeout_s * (_COMPILING if runtime.compile else 1),
        transport=config.transport,
        collectives=config.collectives,
    )


def open_on(
    wanted: str,
    stall_timeout_s: float = 300.0,
    *,
    transport: TransportConfig | None = None,
    collectives: CollectivesConfig | None = None,
) -> tuple[MpiTransport, torch.device, list[str]]:
    """Choose this rank's device, then start MPI.

    Parameters
    ----------
    wanted
        ``"cpu"``, ``"cuda"``, or ``"auto"`` for a GPU where there is one.
    stall_timeout_s
        Longest wait for one transfer, in seconds.
    transport, collectives
        Tables of the configuration; their defaults otherwise.

    Returns
    -------
    transport, device, notes
        The notes, on rank 0, say what is slower than it could be, and the remedy.

    Raises
    ------
    InputError
        For a GPU that is asked for and not there, or, with ``"auto"``, only for some of the ranks.
    """
    moving, summing = transport or TransportConfig(), collectives or CollectivesConfig()
    usable = find_spec("cupy") is not None
    num_devices = torch.cuda.device_count() if wanted != "cpu" and usable else 0
    if wanted == "cuda" and not num_devices:
        why = "this process sees no CUDA device" if usable else "CuPy is missing"
        raise InputError(
            f"[train] device = 'cuda', but {why}; pip install 'pdmpi[cuda13]' (or cuda12), or set 'cpu'"
        )
    if not num_devices:
        keep_freed_memory()
        load_ucx(only_if_asked=True)
        from pdmpi.transport.mpi import MpiTransport
        from pdmpi.transport.places import refuse_mixed_places

        opened = MpiTransport(stall_timeout_s)
        if wanted != "cpu":
            refuse_mixed_places(opened, has_device=False)
        return opened, torch.device("cpu"), []
    chosen = choose_device(os.environ, num_devices, share=moving.share_devices)
    _let_segments_grow()
    device = torch.device("cuda", chosen)
    torch.cuda.set_device(device)
    own = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.set_stream(own)  # no CUDA graph can be captured on the default one
    ucx = load_ucx()
    from pdmpi.transport.open import open_cuda_transport

    on_device, notes = open_cuda_transport(
        stall_timeout_s,
        compute_stream=_stream_of(chosen),
        ucx=ucx,
        num_devices=num_devices,
        device=moving.device,
        collectives=summing.backend,
    )
    return on_device, device, notes


def _stream_of(device: int) -> Callable[[], int]:
    """Return what tells the pointer of a device's current stream; torch's public way takes 8 µs."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return (lambda: torch.cuda.current_stream().cuda_stream) if raw is None else partial(raw, device)


def _let_segments_grow() -> None:
    """Let the segments of torch's allocator grow, unless the user has configured it.

    Memory of CUDA graphs lies in pools of their own, where segments of a fixed size leave gaps.  What is
    sent never lies in torch's memory.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
