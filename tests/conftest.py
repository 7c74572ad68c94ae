"""One thread a process, hypothesis without deadlines, and a reason for every test that cannot run here."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("pdmpi", deadline=None, print_blob=True)
settings.load_profile("pdmpi")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine lacks, with the reason; put the rooms first that all others stand on."""
    items.sort(key=lambda item: item.path.parent.name not in _FIRST)
    for marker, missing in _REQUIREMENTS.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = missing() if marked else ""
        for item in marked:
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is left when a continuous integration runs out of time, which it would lose everything by."""
    end = float(os.environ.get("PDMPI_TEST_END_UNIX_S", "inf"))
    if time.time() > end:
        pytest.skip("out of time: this machine is too slow for all tests (tools/test alone has no limit)")


def _no_gpu() -> str:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "no CUDA device on this machine"


def _no_slurm() -> str:
    missing = [name for name in ("slurmctld", "slurmd", "munged") if not shutil.which(name, path=_SBIN)]
    return f"{', '.join(missing)} not installed (.ci/run installs Slurm when it is root)" if missing else ""


def _no_hosts() -> str:
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    return "" if shutil.which("ip", path=_SBIN) else "ip is not installed (Debian's iproute2)"


_FIRST = ("transport", "runtime")

_SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

_REQUIREMENTS: dict[str, Callable[[], str]] = {"gpu": _no_gpu, "slurm": _no_slurm, "hosts": _no_hosts}
