"""HDF5 files that can be trusted: sealed when written, checked before anything is believed.

A file is a set of plain arrays.  Writing seals it twice: every dataset carries the SHA-256
of its type, shape and bytes, and the file begins with a 512-byte text block (an HDF5 user
block, which every HDF5 tool skips) that holds the SHA-256 of the rest.  Reading verifies the
block before the HDF5 library parses a byte, then refuses whatever is not a small, contiguous,
plain array of the expected type: links to elsewhere, external or virtual storage, filters,
object references, and shapes that promise more bytes than the file has.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from pdmpi.errors import InputError

__all__ = [
    "MAX_FILE_BYTES", "Arrays", "Format", "check_overwrite", "pack", "read_bytes", "read_file",
    "replace_file", "sealed_format", "texts", "texts_array", "unpack", "write_file",
]  # fmt: skip

Arrays = Mapping[str, NDArray[Any]]
"""Datasets by path, ``"stages/replicas"``: int64, float64, bool, or fixed-length UTF-8 bytes."""

MAX_FILE_BYTES = 1 << 30
"""Largest profile or plan that is read."""

_BLOCK_BYTES = 512
_MAGIC = b"pdmpi sealed HDF5 "
_KINDS = {"i": "int64", "f": "float64", "b": "bool", "S": "text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """What a file claims to be.

    Attributes
    ----------
    name
        Value of the root attribute ``format``.
    version
        Value of the root attribute ``format_version``; any other version is refused.
    datasets
        Kind (``"i"``, ``"f"``, ``"b"``, ``"S"``) and number of dimensions of every dataset.
    """

    name: str
    version: int
    datasets: Mapping[str, tuple[str, int]]


def texts_array(values: Sequence[str]) -> NDArray[np.bytes_]:
    """Return strings as one array of fixed-length UTF-8 bytes, shape (len(values),)."""
    encoded = [value.encode() for value in values]
    if any(b"\0" in value for value in encoded):
        raise InputError("a name holds a NUL character; rename it")
    return np.array(encoded, dtype=f"S{max(map(len, encoded), default=1) or 1}")


def texts(array: NDArray[Any]) -> tuple[str, ...]:
    """Return the strings of an array that `texts_array` made."""
    try:
        return tuple(bytes(value).decode() for value in array.tolist())
    except UnicodeDecodeError as error:
        raise InputError(f"text in the file is no UTF-8 ({error.reason}); make it again") from None


def _digest(array: NDArray[Any]) -> str:
    head = f"{array.dtype.str} {array.shape}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()


def pack(arrays: Arrays, fmt: Format) -> bytes:
    """Return a sealed HDF5 image; equal arrays give equal bytes."""
    image = io.BytesIO()
    with h5py.File(image, "w", userblock_size=_BLOCK_BYTES) as file:
        file.attrs["format"] = np.bytes_(fmt.name)
        file.attrs["format_version"] = np.int64(fmt.version)
        for name in sorted(arrays):
            dataset = file.create_dataset(name, data=arrays[name], track_times=False)
            dataset.attrs["sha256"] = np.bytes_(_digest(arrays[name]))
    data = bytearray(image.getvalue())
    seal = hashlib.sha256(memoryview(data)[_BLOCK_BYTES:]).hexdigest()
    block = _MAGIC + f"{fmt.name} {fmt.version} sha256 {seal}\n".encode()
    data[:_BLOCK_BYTES] = block.ljust(_BLOCK_BYTES, b"\0")
    return bytes(data)


def unpack(data: bytes, fmt: Format, source: str = "the file") -> dict[str, NDArray[Any]]:
    """Return the arrays of a sealed image.

    Raises
    ------
    InputError
        The image is foreign, of another format or version, damaged, or holds anything but
        the datasets of `fmt`; the message says which.
    """
    if data[: len(_MAGIC)] != _MAGIC:
        raise InputError(f"{source} is not a file of pdmpi (no seal at its start)")
    words = data[len(_MAGIC) : _BLOCK_BYTES].rstrip(b"\0").decode("ascii", "replace").split()
    if len(words) != 4:
        raise InputError(f"{source} is damaged: its first line is garbled; make it again")
    name, version, _, seal = words
    if name != fmt.name:
        raise InputError(f"{source} is a {name}, not a {fmt.name}")
    if version != str(fmt.version):
        raise InputError(
            f"{source} is a {name} of format version {version}, this pdmpi reads version {fmt.version}; "
            "make it again"
        )
    if hashlib.sha256(memoryview(data)[_BLOCK_BYTES:]).hexdigest() != seal:
        raise InputError(f"{source} is damaged or truncated (SHA-256 differs); make it again")
    try:
        with h5py.File(io.BytesIO(data), "r") as file:
            return {name: _dataset(file, name, kind, len(data)) for name, kind in fmt.datasets.items()}
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, UnicodeError, MemoryError) as error:
        raise InputError(f"{source} is no valid {fmt.name}: {error}; make it again") from None


def _dataset(file: h5py.File, name: str, expected: tuple[str, int], file_bytes: int) -> NDArray[Any]:
    """Read one dataset after checking everything that it declares."""
    node: Any = file
    for part in name.split("/"):
        if not isinstance(node, h5py.Group) or part not in node:
            raise ValueError(f"dataset {name!r} is missing")
        if not isinstance(node.get(part, getlink=True), h5py.HardLink):
            raise ValueError(f"{name!r} is a link to elsewhere")
        node = node[part]
    if not isinstance(node, h5py.Dataset):
        raise ValueError(f"{name!r} is no dataset")
    kind, ndim = expected
    plain = node.chunks is None and not node.is_virtual and node.external is None and node.compression is None
    if not plain:
        raise ValueError(f"dataset {name!r} is not stored contiguously in the file")
    if node.dtype.kind != kind or node.dtype.names is not None or h5py.check_dtype(vlen=node.dtype):
        raise ValueError(f"dataset {name!r} holds {node.dtype}, expected {_KINDS[kind]}")
    if kind in "if" and node.dtype.itemsize != 8:
        raise ValueError(f"dataset {name!r} holds {node.dtype}, expected {_KINDS[kind]}")
    if node.shape is None or len(node.shape) != ndim:
        raise ValueError(f"dataset {name!r} has shape {node.shape}, expected {ndim} dimensions")
    if node.size * node.dtype.itemsize > file_bytes:
        raise ValueError(f"dataset {name!r} declares {node.shape}, more than the whole file holds")
    array: NDArray[Any] = node[()]
    seal = node.attrs.get("sha256")
    if not isinstance(seal, bytes | np.bytes_) or bytes(seal).decode("ascii", "replace") != _digest(array):
        raise ValueError(f"dataset {name!r} does not match its SHA-256")
    return array


def sealed_format(path: Path) -> str:
    """Return the name of the format that a file claims to have.

    Raises
    ------
    InputError
        The file does not exist or is not one of pdmpi's.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_BLOCK_BYTES)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; check the path") from None
    words = head.removeprefix(_MAGIC).split()
    if not head.startswith(_MAGIC) or not words:
        raise InputError(f"{path} is not a file of pdmpi (no seal at its start)")
    return words[0].decode("ascii", "replace")


def check_overwrite(path: Path, force: bool) -> None:
    """Refuse an output path that exists or whose directory does not, before any work is done."""
    if path.exists() and not force:
        raise InputError(f"output {path} exists; choose another name or give --force")
    if not path.parent.is_dir():
        raise InputError(f"output {path}: directory {path.parent} does not exist; create it")


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success flush it to disk and rename it over `path`."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: Path, arrays: Arrays, fmt: Format, force: bool = False) -> None:
    """Write a sealed file whole or not at all.

    Raises
    ------
    InputError
        `path` exists and `force` is false, or its directory does not exist.
    """
    check_overwrite(path, force)
    image = pack(arrays, fmt)
    with replace_file(path) as temporary:
        temporary.write_bytes(image)


def read_file(path: Path, fmt: Format) -> dict[str, NDArray[Any]]:
    """Return the arrays of a sealed file; see `unpack` for what is refused."""
    return unpack(read_bytes(path), fmt, str(path))


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file of at most `MAX_FILE_BYTES`."""
    try:
        if not path.is_file():
            raise InputError(f"{path} does not exist or is no file; check the path")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB; this is no profile or plan")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
