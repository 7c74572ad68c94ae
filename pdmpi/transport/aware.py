"""Whether MPI takes device memory: found out by sending, never by asking.

A query says no where point to point works, and yes where a reduction crashes.  A library
without CUDA support may die of a device pointer, so a child process tries.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from pdmpi.transport.child import ask_child

__all__ = ["Awareness", "probe_awareness"]

_CODE = """
import json
from pdmpi.transport.device import load_ucx
load_ucx()
import cupy
from mpi4py import MPI
me = MPI.COMM_SELF
for size in (8, 4096, 1 << 22):
    source, target = cupy.arange(size, dtype=cupy.uint8), cupy.zeros(size, cupy.uint8)
    cupy.cuda.Device().synchronize()
    requests = [me.Irecv([target, MPI.BYTE], 0), me.Isend([source, MPI.BYTE], 0)]
    MPI.Request.Waitall(requests)
    assert bool((source == target).all()), f"{size} bytes arrived wrongly"
print(json.dumps(["ok"]))
"""


@dataclass(frozen=True, slots=True)
class Awareness:
    """What a probe found.

    Attributes
    ----------
    aware
        Whether device memory can be sent.
    reason
        What went wrong; empty otherwise.
    """

    aware: bool
    reason: str = ""


def probe_awareness(library: str, ucx: str, cache_dir: Path | None = None) -> Awareness:
    """Send device memory in a child process, or return what an earlier probe found.

    Parameters
    ----------
    library
        The MPI library's name and version.
    ucx
        Version of the UCX wheel that was loaded before it, or nothing.
    cache_dir
        Where results are kept, a file for each host, library and setting.
    """
    settings = sorted(
        (k, v) for k, v in os.environ.items() if k.startswith(("OMPI_MCA_", "UCX_", "MPIR_CVAR"))
    )
    key = json.dumps([socket.gethostname(), library, ucx, os.environ.get("LD_LIBRARY_PATH", ""), settings])
    name = f"cuda-aware-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    path = (cache_dir or _cache_dir()) / name
    try:
        return Awareness(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        pass
    answer = ask_child(_CODE)
    found = Awareness(False, answer) if isinstance(answer, str) else Awareness(True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(asdict(found)))
        partial.rename(path)
    except OSError:
        pass  # probed again next time
    return found


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdmpi"
