"""Small file systems that tests fill up."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(directory: Path, size: str) -> Iterator[Path]:
    """Mount a file system of a few megabytes on a directory meanwhile; skip where that cannot be done."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory]).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    try:
        yield directory
    finally:
        subprocess.run(["mount", "-o", "remount,rw", directory], check=True)
        subprocess.run(["umount", "-l", directory], check=True)
