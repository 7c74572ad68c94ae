"""As much of CuPy as `pdmpi.transport.cuda` uses, on the host: streams are threads with queues.

Put before the real one on the path, so that the order of kernels, copies and messages can
be tested where there is no GPU.  A "kernel" is a call queued on a stream.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy import cuda
from cupy._streams import Stream

uint8 = np.uint8


class ndarray(np.ndarray):
    """Host memory that claims to be the device's."""

    def __new__(cls, nbytes: int, dtype: Any, memptr: Any) -> ndarray:
        return np.frombuffer(memptr.memory, dtype, nbytes).view(cls)

    @property
    def data(self) -> Any:  # type: ignore[override]
        return cuda.Pointer(self.ctypes.data)

    def set(self, values: np.ndarray) -> None:
        np.ndarray.__setitem__(self, slice(None), values)


def asnumpy(values: np.ndarray) -> np.ndarray:
    """Copy to the host."""
    return np.array(values)


__all__ = ["Stream", "asnumpy", "cuda", "ndarray", "uint8"]
