"""``cupy.cuda`` of the stand-in."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from cupy._streams import Event, Stream, synchronize_all
from cupy._streams import external_stream as ExternalStream
from cupy.cuda import nccl, runtime

__all__ = [
    "Device", "Event", "ExternalStream", "MemoryPool", "Stream", "alloc_pinned_memory", "nccl", "runtime",
]  # fmt: skip


@dataclass
class Pointer:
    ptr: int
    memory: bytearray | None = None


class Device:
    id = 0
    pci_bus_id = "0000:00:00.0"

    def use(self) -> None:
        pass

    def synchronize(self) -> None:
        synchronize_all()


class MemoryPool:
    def malloc(self, nbytes: int) -> Pointer:
        memory = bytearray(nbytes)
        return Pointer(ctypes.addressof((ctypes.c_char * nbytes).from_buffer(memory)), memory)


def alloc_pinned_memory(nbytes: int) -> bytearray:
    return bytearray(nbytes)
