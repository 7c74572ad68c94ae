"""``cupy.cuda.runtime`` of the stand-in."""

from __future__ import annotations

import ctypes

from cupy._streams import external_stream

memcpyDefault = 4


def memcpyAsync(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
    external_stream(stream).enqueue(lambda: ctypes.memmove(target, source, nbytes))
