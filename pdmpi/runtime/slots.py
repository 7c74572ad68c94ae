"""Boundary buffers: one contiguous region for each channel and slot, at an address fixed before launch.

A region starts with a header of three words (microbatch, weight version, loss) and holds
the channel's tensors one behind the other, so that one message moves a whole boundary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pdmpi.errors import PdmpiError
from pdmpi.graph import Ref, TensorSpec
from pdmpi.transport.base import Bytes

__all__ = ["HEADER_BYTES", "Region", "host_memory", "torch_dtype"]

HEADER_BYTES = 64
_ALIGNMENT_BYTES = 64


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a spec's name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class Region:
    """The buffer of one channel in one slot.

    Parameters
    ----------
    specs
        What the channel carries, in order.
    allocate
        Returns a flat ``uint8`` tensor of so many bytes.
    """

    def __init__(self, specs: Mapping[Ref, TensorSpec], allocate: Callable[[int], Tensor]) -> None:
        offset, starts = HEADER_BYTES, []
        for spec in specs.values():
            starts.append(offset)
            offset += -(-spec.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        memory = allocate(offset)
        self.bytes: Bytes = memory.numpy()
        self._header = self.bytes[:HEADER_BYTES].view("int64")
        self._loss = self.bytes[:HEADER_BYTES].view("float64")
        self.tensors: dict[Ref, Tensor] = {
            ref: memory[start : start + spec.nbytes].view(torch_dtype(spec.dtype)).view(spec.shape)
            for (ref, spec), start in zip(specs.items(), starts, strict=True)
        }

    def stamp(self, microbatch: int, version: int, loss: float = math.nan) -> None:
        """Write the header before the region is sent."""
        self._header[0] = microbatch
        self._header[1] = version
        self._loss[2] = loss

    def check(self, microbatch: int) -> None:
        """Raise unless the region holds what the program says was received."""
        if self._header[0] != microbatch:
            raise PdmpiError(f"received microbatch {self._header[0]} where {microbatch} was due")

    @property
    def version(self) -> int:
        """Weight version that made the tensors."""
        return int(self._header[1])

    @property
    def loss(self) -> float:
        """Loss of the microbatch, known from the last stage backwards; NaN elsewhere."""
        return float(self._loss[2])


def host_memory(nbytes: int) -> Tensor:
    """Allocate host memory for a region."""
    return torch.zeros(nbytes, dtype=torch.uint8)
