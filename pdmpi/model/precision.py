"""The types that a run computes in: parameters of 16 bits are computed with under autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["autocasting", "is_sixteen_bits"]


def is_sixteen_bits(dtype: torch.dtype) -> bool:
    """Whether a type is one whose updates need float32 masters."""
    return dtype in (torch.bfloat16, torch.float16)


def autocasting(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Return what forwards and losses run in, given the type of their parameters.

    In 16 bits PyTorch computes norms and losses in float32; other types are computed in as they are.
    """
    if not is_sixteen_bits(dtype):
        return nullcontext()
    return torch.autocast(device.type, dtype, cache_enabled=False)
