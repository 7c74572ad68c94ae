"""What a checkpoint holds, as plain arrays keyed by the model's own names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pdmpi.errors import InputError
from pdmpi.graph.graph import DTYPE_BYTES

__all__ = ["STORAGE", "Array", "Snapshot", "path_of", "split_path"]

STORAGE = {
    "bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8",
}  # fmt: skip
"""NumPy types that carry the raw bits of the dtypes NumPy lacks; every other dtype carries itself."""


@dataclass(frozen=True, slots=True)
class Array:
    """An array with torch's name of its dtype; `bits` holds raw bits for the types in `STORAGE`."""

    bits: NDArray[np.generic]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InputError(f"dtype {self.dtype!r} cannot be stored in a checkpoint")
        if self.bits.dtype.name != STORAGE.get(self.dtype, self.dtype):
            raise ValueError(f"an array of {self.dtype} is stored as {self.bits.dtype.name}")

    @classmethod
    def of(cls, values: NDArray[np.generic]) -> Array:
        """Wrap a NumPy array whose dtype torch knows by the same name."""
        return cls(values, values.dtype.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, as in torch."""
        return self.bits.shape

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.bits.shape) * self.bits.dtype.itemsize

    def equals(self, other: Array) -> bool:
        """Tell whether both hold the same bits (a NaN equals itself)."""
        same_kind = (self.dtype, self.shape) == (other.dtype, other.shape)
        return same_kind and self.bits.tobytes() == other.bits.tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of some layers at one moment when the pipeline is drained.

    Random generators have none: random numbers follow from the seed, the layer's name and the
    microbatch.

    Attributes
    ----------
    parameters
        By their name in the model's ``state_dict``.
    optimizer
        The optimizer's state of each parameter: name, then key (``"exp_avg"``).
    buffers
        By their name in the model's ``state_dict``.
    replica_buffers
        Buffers of the stage's replicas other than the first, where they differ
        (running statistics): replica, then name.
    """

    parameters: Mapping[str, Array] = field(default_factory=dict)
    optimizer: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)
    buffers: Mapping[str, Array] = field(default_factory=dict)
    replica_buffers: Mapping[int, Mapping[str, Array]] = field(default_factory=dict)

    def items(self) -> Iterator[tuple[str, Array]]:
        """Yield every array with its path in the file."""
        for name, array in self.parameters.items():
            yield path_of("parameters", name), array
        for name, keys in self.optimizer.items():
            for key, array in keys.items():
                yield path_of("optimizer", name, key), array
        for name, array in self.buffers.items():
            yield path_of("buffers", name), array
        for replica, buffers in self.replica_buffers.items():
            for name, array in buffers.items():
                yield path_of("replicas", str(replica), name), array

    @classmethod
    def from_items(cls, items: Iterable[tuple[str, Array]]) -> Snapshot:
        """Build a snapshot from paths and arrays."""
        parameters: dict[str, Array] = {}
        optimizer: dict[str, dict[str, Array]] = {}
        buffers: dict[str, Array] = {}
        replicas: dict[int, dict[str, Array]] = {}
        for path, array in items:
            match split_path(path):
                case ("parameters", name):
                    parameters[name] = array
                case ("optimizer", name, key):
                    optimizer.setdefault(name, {})[key] = array
                case ("buffers", name):
                    buffers[name] = array
                case ("replicas", replica, name) if replica.isdecimal():
                    replicas.setdefault(int(replica), {})[name] = array
                case _:
                    raise InputError(f"a checkpoint has no place {path!r}; the file is foreign or damaged")
        return cls(
            parameters=parameters,
            optimizer=optimizer,
            buffers=buffers,
            replica_buffers=replicas,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for _, array in self.items())


def path_of(*parts: str) -> str:
    """Join names into a path of HDF5 groups; what would mean something to HDF5 is percent-encoded."""
    if not all(parts):
        raise InputError(f"a checkpoint cannot name an array {parts!r}: a part is empty")
    quoted = (part.replace("%", "%25").replace("/", "%2F").replace("\0", "%00") for part in parts)
    return "/".join("%2E" if part == "." else part for part in quoted)


def split_path(path: str) -> tuple[str, ...]:
    """Undo `path_of`."""
    return tuple(
        part.replace("%2E", ".").replace("%00", "\0").replace("%2F", "/").replace("%25", "%")
        for part in path.split("/")
    )
