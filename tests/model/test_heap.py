"""Memory that tensors leave is kept: the kernel need not clear it again."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource, sys, torch
from pdmpi.model.heap import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
for _ in range(40):
    torch.ones(1 << 24)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[1] - faults[0], faults[-1] - faults[20])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc alone")
def test_large_tensors_take_the_pages_of_those_before() -> None:
    """In the long run; without it each tensor of 64 MiB costs as many page faults as the first."""
    counts = {
        way: tuple(map(int, subprocess.check_output([sys.executable, "-c", CODE, way], text=True).split()))
        for way in ("kept", "given back")
    }
    first, following = counts["given back"]
    assert following > 10 * first, counts
    first, following = counts["kept"]
    assert following < first / 4, counts
