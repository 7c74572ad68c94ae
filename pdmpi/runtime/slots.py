"""Boundary buffers: one contiguous region for each channel and slot, at an address fixed before launch.

A region starts with a header of three words (microbatch, weight version, loss) and holds
the channel's tensors one behind the other, so that one message moves a whole boundary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from pdmpi.errors import PdmpiError
from pdmpi.graph import Ref, TensorSpec
from pdmpi.transport.base import Bytes, Transport

__all__ = ["HEADER_BYTES", "Allocate", "Region", "device_memory", "host_memory", "torch_dtype"]

Allocate = Callable[[int], tuple[Tensor, Bytes]]
"""Returns flat memory of so many bytes: as a ``uint8`` tensor, and as the transport takes it."""

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
        Returns flat memory of so many bytes.

    Notes
    -----
    The header is written and checked by the host, so it stays empty on a device.
    """

    def __init__(self, specs: Mapping[Ref, TensorSpec], allocate: Allocate) -> None:
        offset, starts = HEADER_BYTES, []
        for spec in specs.values():
            starts.append(offset)
            offset += -(-spec.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        memory, self.bytes = allocate(offset)
        self.on_host = memory.device.type == "cpu"
        if self.on_host:
            self._header = self.bytes[:HEADER_BYTES].view("int64")
            self._loss = self.bytes[:HEADER_BYTES].view("float64")
        self.tensors: dict[Ref, Tensor] = {
            ref: memory[start : start + spec.nbytes].view(torch_dtype(spec.dtype)).view(spec.shape)
            for (ref, spec), start in zip(specs.items(), starts, strict=True)
        }

    def stamp(self, microbatch: int, version: int, loss: float = math.nan) -> None:
        """Write the header before the region is sent."""
        if not self.on_host:
            return
        self._header[0] = microbatch
        self._header[1] = version
        self._loss[2] = loss

    def check(self, microbatch: int, version: int) -> None:
        """Raise unless the region holds what the program says was received: whose, of which weights."""
        if self.on_host and (self._header[0] != microbatch or self._header[1] != version):
            raise PdmpiError(
                f"received microbatch {self._header[0]} of weight version {self._header[1]} where "
                f"{microbatch} of version {version} was due"
            )

    @property
    def loss(self) -> float:
        """Loss of the microbatch, known from the last stage backwards; NaN elsewhere."""
        return float(self._loss[2]) if self.on_host else math.nan


def host_memory(nbytes: int) -> tuple[Tensor, Bytes]:
    """Allocate host memory."""
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    return memory, memory.numpy()


def device_memory(transport: Transport) -> Allocate:
    """Return what allocates memory that the transport can move from the rank's device."""

    def allocate(nbytes: int) -> tuple[Tensor, Bytes]:
        buffer = transport.allocate(nbytes)
        return from_dlpack(buffer), buffer

    return allocate
