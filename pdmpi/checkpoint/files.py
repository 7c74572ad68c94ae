"""Files that are whole and durable, or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdmpi.plan.hdf5 import replace_file

__all__ = ["free_bytes", "replaced", "sync_directory", "write_bytes"]


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give a temporary path to write; on success it takes the place of ``path``, durably.

    On any error the temporary file is removed and ``path`` is as it was.
    """
    with replace_file(path) as temporary:
        yield temporary
    sync_directory(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file so that it is whole or not there."""
    with replaced(path) as temporary:
        temporary.write_bytes(data)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may still write on the file system of ``path``."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
