"""bfloat16 and float16 on the host agree with torch's own conversions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pdmpi.transport.dtypes import round_into, widened


def floats() -> np.ndarray:
    """All kinds of float32: normal, denormal, huge, ties, infinities, NaN."""
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    ties = (np.arange(0, 2**16, 7, dtype=np.uint32) << 16) | 0x8000
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 65504.0, 65520.0, 1e-40], np.float32)
    return np.concatenate([bits.view(np.float32), ties.view(np.float32), special])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_torchs(dtype: torch.dtype) -> None:
    values = floats()
    expected = torch.from_numpy(values).to(dtype)
    buffer = np.empty(2 * values.size, np.uint8)
    round_into(values, str(dtype).removeprefix("torch."), buffer)
    found = torch.from_numpy(buffer).view(dtype)
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widening_is_exact(dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    found = widened(bits.numpy().view(np.uint8), str(dtype).removeprefix("torch."))
    expected = bits.view(dtype).float()
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=0, equal_nan=True)
