"""Host arrays of torch's dtypes, and the types in which they are summed.

numpy has no bfloat16, and MPI sums neither bfloat16 nor float16 reliably (some libraries
return garbage without an error), so both are summed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdmpi.errors import InputError, nearest
from pdmpi.transport.base import Bytes

__all__ = ["SUM_DTYPES", "known_sum", "needs_widening", "round_into", "summed_view", "widened"]

SUM_DTYPES: Mapping[str, str] = {
    "float32": "float32",
    "float64": "float64",
    "bfloat16": "float32",
    "float16": "float32",
    "int8": "int8",
    "uint8": "uint8",
    "int16": "int16",
    "int32": "int32",
    "int64": "int64",
}
"""Torch's name of each dtype that can be summed, and numpy's name of the type it is summed in."""


def needs_widening(dtype: str) -> bool:
    """Whether values are converted before they are summed.

    Raises
    ------
    InputError
        If the dtype cannot be summed.
    """
    if dtype not in SUM_DTYPES:
        raise InputError(
            f"gradients of dtype {dtype!r} cannot be summed over ranks{nearest(dtype, SUM_DTYPES)}"
        )
    return SUM_DTYPES[dtype] != dtype


def summed_view(buffer: Bytes, dtype: str) -> NDArray[Any]:
    """Return the buffer as an array of a dtype that needs no widening."""
    return buffer.view(np.dtype(SUM_DTYPES[dtype]))


def widened(buffer: Bytes, dtype: str, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Return bfloat16 or float16 values as float32, in ``out`` if given."""
    out = np.empty(buffer.nbytes // 2, np.float32) if out is None else out
    if dtype == "float16":
        out[...] = buffer.view(np.float16)
    else:
        np.left_shift(buffer.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
    return out


def round_into(wide: NDArray[Any], dtype: str, buffer: Bytes) -> None:
    """Round float32 values to the nearest bfloat16 or float16, ties to even."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            buffer.view(np.float16)[...] = wide.astype(np.float16)
        return
    bits = wide.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    buffer.view(np.uint16)[...] = np.where(np.isnan(wide.view(np.float32)), quiet, rounded)


def known_sum(dtype: str, num_ranks: int, place: int) -> tuple[Bytes, Bytes]:
    """Return what rank ``place`` of a group brings to a trial of a sum, and what the sum must be."""
    pattern = np.resize(np.array([1.0, 2.0, 3.0, 0.0]), 1031)
    weights = [1 + index % 3 for index in range(num_ranks)]
    return _as_bytes(pattern * weights[place], dtype), _as_bytes(pattern * sum(weights), dtype)


def _as_bytes(values: NDArray[Any], dtype: str) -> Bytes:
    narrow = values.astype(np.dtype(SUM_DTYPES[dtype]))
    wide = needs_widening(dtype)
    buffer: Bytes = np.empty(2 * values.size if wide else narrow.nbytes, np.uint8)
    if wide:
        round_into(narrow, dtype, buffer)
    else:
        summed_view(buffer, dtype)[...] = narrow
    return buffer
