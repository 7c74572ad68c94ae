"""Which GPU a rank drives, chosen before MPI starts, and what MPI needs to reach it.

A CUDA context made before the choice would sit on GPU 0 for every rank; a UCX loaded after
MPI would be ignored.  So this comes first, and nothing here touches a device.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping, MutableMapping, Sequence

from pdmpi.errors import InputError
from pdmpi.transport.launcher import local_rank, local_size

__all__ = ["choose_device", "isolation_problem", "load_ucx", "sharing_problem"]


def choose_device(environ: Mapping[str, str], num_devices: int, *, share: bool = False) -> int:
    """Return the index, among the visible devices, of the one that this rank drives.

    Parameters
    ----------
    environ
        Tells this rank's number among those of its host.
    num_devices
        Devices that this process sees (``torch.cuda.device_count()`` makes no context).
    share
        Let several ranks drive one device.

    Raises
    ------
    InputError
        If there is no device, or there are more ranks than devices and ``share`` is false.
    """
    if num_devices < 1:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        seen = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else ""
        raise InputError(f"transport.device = 'cuda', but this process sees no CUDA device{seen}")
    mine, ranks = local_rank(environ) or 0, local_size(environ) or 1
    if num_devices == 1 and _isolated(environ):
        return 0
    if max(mine + 1, ranks) > num_devices and not share:
        raise InputError(
            f"{max(mine + 1, ranks)} ranks on this host, but {num_devices} CUDA devices: start at most "
            f"{num_devices} ranks a host, or set [transport] share_devices = true"
        )
    return mine % num_devices


def _isolated(environ: Mapping[str, str]) -> bool:
    """Whether the launcher gave each rank a device of its own and hid the others."""
    return bool(environ.get("SLURM_GPUS_PER_TASK")) and (local_size(environ) or 1) > 1


def isolation_problem(environ: Mapping[str, str], num_devices: int) -> str:
    """Return what is wrong with the launcher's binding of devices, and its remedy, or nothing."""
    if num_devices == 1 and _isolated(environ):
        return (
            "--gpus-per-task hides the other GPUs of the host, so CUDA IPC between ranks is off: transfers "
            "go through the host; ask with --gpus-per-node and --gpu-bind=none"
        )
    return ""


def sharing_problem(devices: Sequence[tuple[str, str]]) -> str:
    """Say which ranks drive the same device, or nothing.

    Parameters
    ----------
    devices
        Host and the device's own id (UUID), by rank.
    """
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, device in enumerate(devices):
        ranks.setdefault(device, []).append(rank)
    return "; ".join(
        f"ranks {', '.join(map(str, shared))} share one GPU of host {host}"
        for (host, _), shared in ranks.items()
        if len(shared) > 1
    )


def load_ucx(environ: MutableMapping[str, str] = os.environ, *, only_if_asked: bool = False) -> str:
    """Load the UCX with CUDA from its wheel, if that is installed, and let Open MPI use it.

    Must come before MPI starts.  A site's own MPI is left alone: its UCX was chosen when it
    was built.

    Parameters
    ----------
    environ
        Tells Open MPI to use it.
    only_if_asked
        Load it only where that asks for UCX already (as tools/gpu-env does): ranks on CPUs do without.

    Returns
    -------
    str
        Version of the wheel, or nothing when there is none.
    """
    if only_if_asked and environ.get("OMPI_MCA_pml") != "ucx":
        return ""
    if importlib.util.find_spec("libucx") is None:
        return ""
    libucx = importlib.import_module("libucx")
    libucx.load_library()
    environ.setdefault("OMPI_MCA_pml", "ucx")
    return str(libucx.__version__)
