"""Memory that tensors on the host leave is kept for those that follow."""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Of glibc's ``malloc.h``."""


def keep_freed_memory() -> None:
    """Let the C library keep what this process's main thread frees, from now on.

    By default glibc maps every block of 32 MiB and more anew and gives it back as soon as it is free
    (mallopt(3)), so that the kernel clears each page of a large layer's gradient in every backward.
    The process stays at its peak, where small blocks between large ones may leave gaps.  Does nothing
    with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)
