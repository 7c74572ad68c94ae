"""Which instruction a rank is at, and its last words, where others of its host can read them."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import MutableSequence

import numpy as np
from numpy.typing import NDArray

from pdmpi.runtime.guardian import HEAD_BYTES, NOWHERE, NUM_COLUMNS, NUMBER, WORDS

__all__ = ["Recorder"]


class Recorder:
    """A file without a name that its rank maps, and others open by the rank's process id.

    It outlives the rank as long as somebody has it open: the guardian reads there what a
    killed rank was doing.

    Attributes
    ----------
    descriptor
        Of the file.
    """

    def __init__(self) -> None:
        self.descriptor = _unnamed_file()
        os.ftruncate(self.descriptor, HEAD_BYTES)
        self._head = mmap.mmap(self.descriptor, HEAD_BYTES)
        self._number = memoryview(self._head)[NUMBER].cast("q")
        self._number[0] = NOWHERE

    def begin(self, rows: NDArray[np.int32]) -> MutableSequence[int]:
        """Take a rank's instructions; return where to put the number of the one that is run: element 0."""
        assert rows.shape[1:] == (NUM_COLUMNS,)
        self._number[0] = NOWHERE
        os.pwrite(self.descriptor, np.ascontiguousarray(rows).tobytes(), HEAD_BYTES)
        return self._number  # type: ignore[return-value]

    def end(self) -> None:
        """Note that all of them have been run."""
        self._number[0] = NOWHERE

    def say(self, words: bytes) -> None:
        """Leave last words, at most 16 bytes."""
        self._head[WORDS] = words.ljust(WORDS.stop, b"\0")

    def close(self) -> None:
        """Give the file back."""
        self._number.release()
        self._head.close()
        os.close(self.descriptor)


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("pdmpi-recorder")
    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())
