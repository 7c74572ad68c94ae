"""A model's ``state_dict`` as a safetensors file: written from a checkpoint, read by name.

The format is eight bytes of length, a JSON header, and the tensors' bytes.  Read and
written here one tensor at a time, because the ``safetensors`` package holds whole files in
memory, or needs torch for bfloat16.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pdmpi.checkpoint.arrays import STORAGE, Array, split_path
from pdmpi.checkpoint.files import replaced
from pdmpi.checkpoint.shard import ArraySpec
from pdmpi.checkpoint.store import Checkpoint
from pdmpi.errors import InputError
from pdmpi.graph.graph import DTYPE_BYTES

__all__ = ["SafetensorsFile", "export"]

_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip
_DTYPES = {text: dtype for dtype, text in _NAMES.items()}
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the ``safetensors`` package."""


def export(checkpoint: Checkpoint, path: Path) -> int:
    """Write the model's parameters and buffers under their own names; return how many.

    Raises
    ------
    InputError
        Bytes of the checkpoint have changed, or a dtype has no name in safetensors.
    """
    specs: dict[str, ArraySpec] = {}
    paths: dict[str, str] = {}
    for shard in checkpoint.manifest.shards:
        for path_in_shard, spec in shard.arrays.items():
            kind, name, *_ = split_path(path_in_shard)
            if kind in ("parameters", "buffers") and name not in specs:
                specs[name], paths[name] = spec, path_in_shard
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    # The largest elements first: every tensor then starts aligned, as the format asks.
    order = sorted(specs, key=lambda name: (-DTYPE_BYTES[specs[name].dtype], name))
    for name in order:
        spec = specs[name]
        if spec.dtype not in _NAMES:
            raise InputError(f"{name!r} is {spec.dtype}, which safetensors files cannot hold")
        end = offset + spec.nbytes
        header[name] = {"dtype": _NAMES[spec.dtype], "shape": spec.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replaced(path) as temporary, temporary.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            file.write(checkpoint.array(paths[name]).bits.tobytes())
    return len(order)


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int


class SafetensorsFile:
    """A safetensors file whose header has been checked; tensors are read one by one.

    Raises
    ------
    InputError
        The file is no safetensors file, or its header promises what the file does not hold.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > min(size - 8, _MAX_HEADER_BYTES):
                    raise ValueError("its header is longer than the file")
                header = json.loads(file.read(length))
            self._entries = _entries(header, 8 + length, size)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
            raise InputError(f"{path} is no safetensors file: {error}") from error

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors."""
        return frozenset(self._entries)

    def read(self, names: Collection[str]) -> Mapping[str, Array]:
        """Read some tensors.

        Raises
        ------
        InputError
            A name is not in the file.
        """
        missing = sorted(set(names) - self.names)
        if missing:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise InputError(f"{self._path} holds no {shown}; it belongs to another model")
        found = {}
        with self._path.open("rb") as file:
            for name in names:
                entry = self._entries[name]
                file.seek(entry.start)
                stored = np.dtype(STORAGE.get(entry.dtype, entry.dtype))
                bits = np.fromfile(file, stored, math.prod(entry.shape)).reshape(entry.shape)
                found[name] = Array(bits, entry.dtype)
        return found


def _entries(header: Mapping[str, Any], begin: int, size: int) -> dict[str, _Entry]:
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = _DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
        start, end = (int(n) for n in entry["data_offsets"])
        promised = math.prod(shape) * DTYPE_BYTES[dtype]
        if min(shape, default=0) < 0 or not 0 <= start <= end <= size - begin or end - start != promised:
            raise ValueError(f"{name!r} of {dtype}{shape} does not lie at bytes {start}-{end} of the file")
        found[name] = _Entry(dtype, shape, begin + start)
    return found
