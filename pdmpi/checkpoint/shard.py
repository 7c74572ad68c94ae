"""One rank's part of a checkpoint: an HDF5 file with a hash for each array.

Every array is a contiguous dataset under its path (``parameters/conv1.weight``,
``optimizer/conv1.weight/momentum_buffer``) with two attributes: ``dtype``, torch's name,
and ``sha256`` of its bytes.  Nothing in the file is code, and nothing in it is trusted:
compression, external and virtual storage, links and other types are refused, so a foreign
file can neither run anything nor fill the memory.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from pdmpi.checkpoint.arrays import STORAGE, Array, Snapshot
from pdmpi.checkpoint.files import replaced
from pdmpi.errors import InputError
from pdmpi.graph.graph import DTYPE_BYTES

__all__ = ["FORMAT", "VERSION", "ArraySpec", "read_shard", "read_specs", "write_shard"]

FORMAT = "pdmpi-checkpoint-shard"
"""The ``format`` attribute of every shard."""

VERSION = 1
"""The newest version of the format that this code writes and reads."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What the manifest says of one array: torch's name of its dtype, shape, and SHA-256 of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(math.prod(self.shape) * DTYPE_BYTES[self.dtype])


def write_shard(path: Path, snapshot: Snapshot, session: str) -> dict[str, ArraySpec]:
    """Write one rank's arrays; the file is whole and on disk, or not there.

    Parameters
    ----------
    path
        Target, in a directory that exists.
    snapshot
        Arrays, C-contiguous.
    session
        Text that all shards of one checkpoint share, so that shards of two are never mixed.

    Returns
    -------
    dict
        What `read_specs` would find in the file.

    Raises
    ------
    OSError
        The disk is full or does not answer.
    """
    arrays = dict(snapshot.items())
    specs = {}
    # Hashing needs a core for as long as a fast disk needs to write: both at once.
    with ThreadPoolExecutor(1, "checkpoint-hash") as pool, replaced(path) as temporary:
        digests = pool.map(_digest, arrays.values())
        # In this layout all but the arrays is checksummed, and a text of fixed length lies in what is: from
        # one in a heap, as HDF5 has them by default, a flipped bit can keep it from ever coming back.
        with h5py.File(temporary, "w", libver="latest") as file:
            file.attrs.update(
                {"format": np.bytes_(FORMAT), "version": VERSION, "session": np.bytes_(session)}
            )
            for name, array in arrays.items():
                file.create_dataset(name, data=array.bits, track_times=False)
            file.flush()  # and to the disk, while the last arrays are hashed; what follows is little
            os.fsync(file.id.get_vfd_handle())
            for (name, array), digest in zip(arrays.items(), digests, strict=True):
                file[name].attrs.update({"dtype": np.bytes_(array.dtype), "sha256": np.bytes_(digest)})
                specs[name] = ArraySpec(array.dtype, array.shape, digest)
    return specs


def read_specs(path: Path, session: str | None = None) -> dict[str, ArraySpec]:
    """Return the arrays that a shard says it holds, without reading them.

    Raises
    ------
    InputError
        The file is foreign, truncated, of another version, or of another checkpoint.
    """
    with _opened(path, session) as file:
        specs: dict[str, ArraySpec] = {}
        for name, dataset in _walk(file, path):
            dtype, digest = _attribute(dataset, "dtype"), _attribute(dataset, "sha256")
            if dtype not in DTYPE_BYTES or not isinstance(digest, str):
                raise InputError(f"{path}: dataset {name!r} carries no dtype and hash; the file is foreign")
            specs[name] = ArraySpec(dtype, tuple(map(int, dataset.shape)), digest)
        return specs


def read_shard(
    path: Path, specs: Mapping[str, ArraySpec], session: str | None = None
) -> Iterator[tuple[str, Array]]:
    """Yield the arrays named in ``specs``, each checked against its hash.

    Raises
    ------
    InputError
        An array is missing, has another shape or type, or its bytes have changed.
    """
    with _opened(path, session) as file:
        for name, spec in specs.items():
            dataset = _dataset(file, name, path)
            stored = np.dtype(STORAGE.get(spec.dtype, spec.dtype))
            if dataset.dtype != stored or tuple(dataset.shape) != spec.shape:
                raise InputError(
                    f"{path}: {name!r} is {dataset.dtype}{tuple(dataset.shape)}, the manifest says"
                    f" {spec.dtype}{spec.shape}; the file is damaged"
                )
            bits = np.empty(spec.shape, stored)
            if bits.size:
                dataset.read_direct(bits)
            array = Array(bits, spec.dtype)
            if _digest(array) != spec.sha256:
                raise InputError(
                    f"{path}: the bytes of {name!r} do not match their hash; the file is damaged"
                )
            yield name, array


def _digest(array: Array) -> str:
    flat = np.ascontiguousarray(array.bits).reshape(-1)
    return hashlib.sha256(flat.view(np.uint8).data).hexdigest()


@contextmanager
def _opened(path: Path, session: str | None) -> Iterator[h5py.File]:
    try:
        with h5py.File(path, "r") as file:
            if _attribute(file, "format") != FORMAT:
                raise InputError(f"{path} is no shard of a checkpoint")
            version = _attribute(file, "version")
            if version != VERSION:
                raise InputError(
                    f"{path}: version {version} of the checkpoint format; this pdmpi reads version {VERSION}"
                )
            if session is not None and _attribute(file, "session") != session:
                raise InputError(f"{path} belongs to another checkpoint")
            yield file
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        raise InputError(
            f"{path} cannot be read: {error}; the file is missing, truncated or damaged"
        ) from error


def _attribute(holder: h5py.File | h5py.Dataset, name: str) -> object:
    """Return an attribute that is a text or an integer, as `write_shard` writes them; None for all else."""
    if name not in holder.attrs:
        return None
    found = h5py.h5a.open(holder.id, name.encode())
    if found.get_type().get_class() not in (h5py.h5t.STRING, h5py.h5t.INTEGER) or found.shape != ():
        return None
    value: object = holder.attrs[name]
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _walk(file: h5py.File, path: Path) -> Iterator[tuple[str, h5py.Dataset]]:
    pending = sorted(file)
    while pending:
        name = pending.pop()
        if isinstance(file.get(name, getlink=True), h5py.HardLink) and isinstance(file[name], h5py.Group):
            if name.count("/") > 2:
                raise InputError(f"{path}: group {name!r} is nested too deep; the file is foreign")
            pending += sorted(f"{name}/{child}" for child in file[name])
        else:
            yield name, _dataset(file, name, path)


def _dataset(file: h5py.File, name: str, path: Path) -> h5py.Dataset:
    parts = name.split("/")
    for end in range(1, len(parts) + 1):
        if not isinstance(file.get("/".join(parts[:end]), getlink=True), h5py.HardLink):
            raise InputError(f"{path}: {name!r} is missing or a link; the file is foreign or damaged")
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset) or dataset.shape is None:
        raise InputError(f"{path}: {name!r} is no array; the file is foreign or damaged")
    if (
        dataset.chunks
        or dataset.is_virtual
        or dataset.external
        or dataset.id.get_create_plist().get_nfilters()
    ):
        raise InputError(f"{path}: {name!r} is not stored plainly; the file is foreign")
    if dataset.size and dataset.id.get_storage_size() < dataset.nbytes:
        raise InputError(f"{path}: {name!r} is not wholly in the file; it is damaged")
    return dataset
