"""Opens the transport that suits a job on GPUs: what MPI takes, and what sums."""

from __future__ import annotations

import os
from collections.abc import Callable

from pdmpi.errors import InputError
from pdmpi.transport.aware import probe_awareness
from pdmpi.transport.cuda import CudaTransport, device_id, nccl_problem
from pdmpi.transport.device import isolation_problem, sharing_problem
from pdmpi.transport.launcher import local_rank
from pdmpi.transport.links import Link, link_pairs, measure_links
from pdmpi.transport.mpi import MpiTransport, library
from pdmpi.transport.places import refuse_mixed_places
from pdmpi.transport.share import share

__all__ = ["measure_device_links", "open_cuda_transport"]


def open_cuda_transport(
    stall_timeout_s: float,
    *,
    compute_stream: Callable[[], int],
    ucx: str,
    num_devices: int,
    device: str = "auto",
    collectives: str = "auto",
) -> tuple[CudaTransport, list[str]]:
    """Open a transport on every rank together, each with its device chosen and current.

    Parameters
    ----------
    stall_timeout_s
        Longest wait for one transfer, in seconds.
    compute_stream
        Returns the pointer of the stream that computes.
    ucx
        What `load_ucx` returned.
    num_devices
        Devices that this process sees.
    device
        ``[transport] device``: ``"cuda"`` gives MPI device memory, ``"host"`` pinned host
        buffers, ``"auto"`` what a probe says.
    collectives
        ``[collectives] backend``: ``"nccl"``, ``"mpi"`` or ``"auto"``.

    Returns
    -------
    transport, notes
        The notes, on rank 0, say what is slower than it could be, and the remedy.

    Raises
    ------
    InputError
        If what is asked for cannot be had, on every rank.
    """
    control = MpiTransport(stall_timeout_s)
    refuse_mixed_places(control, has_device=True)
    host = os.uname().nodename
    mine = {
        "device": [host, device_id()],
        "isolation": isolation_problem(os.environ, num_devices),
        "nccl": nccl_problem(),
        "unaware": _why_unaware(device, ucx),
    }
    ranks = share(control, mine)
    control.close()
    shared = sharing_problem([(rank["device"][0], rank["device"][1]) for rank in ranks])
    no_nccl = shared or next((rank["nccl"] for rank in ranks if rank["nccl"]), "")
    if no_nccl and collectives == "nccl":
        raise InputError(
            f"collectives.backend = 'nccl', but {no_nccl}; set 'mpi', or start fewer ranks a host"
        )
    unaware = next((rank["unaware"] for rank in ranks if rank["unaware"]), "")
    if device == "cuda" and unaware:
        raise InputError(
            f"transport.device = 'cuda', but {library()} takes no device memory ({unaware}); use a "
            "CUDA-aware MPI, or pip install 'pdmpi[cuda13]' (or cuda12) with Open MPI's wheel, or set 'auto'"
        )
    transport = CudaTransport(
        stall_timeout_s,
        compute_stream=compute_stream,
        aware=device != "host" and not unaware,
        use_nccl=collectives != "mpi" and not no_nccl,
    )
    notes = sorted({rank["isolation"] for rank in ranks if rank["isolation"]})
    notes += [f"{no_nccl}, so gradients are summed by MPI through the host"] if no_nccl else []
    if device == "auto" and unaware and transport.size > 1:
        (link,) = measure_device_links(transport, [(0, 1)])
        notes.append(
            f"{library()} takes no device memory ({unaware}): transfers pass through pinned host buffers at "
            f"{link.bandwidth_bytes_per_s / 1e9:.1f} GB/s; `pdmpi doctor` says what to install"
        )
    return transport, notes if transport.rank == 0 else []


def measure_device_links(transport: CudaTransport, pairs: list[tuple[int, int]] | None = None) -> list[Link]:
    """Measure links between device buffers, all ranks together."""
    return measure_links(transport, pairs or link_pairs(transport.size), "cuda", transport.allocate)


def _why_unaware(device: str, ucx: str) -> str:
    """Probe on one rank of each host; return what went wrong, or nothing."""
    if device == "host" or local_rank(os.environ):
        return ""
    return probe_awareness(library(), ucx).reason
