"""The manifest: what a complete checkpoint consists of, written after everything else."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pdmpi.checkpoint.files import write_bytes
from pdmpi.checkpoint.shard import ArraySpec
from pdmpi.errors import InputError
from pdmpi.graph.graph import DTYPE_BYTES

__all__ = ["MANIFEST", "Manifest", "ShardEntry", "load_manifest", "save_manifest"]

MANIFEST = "manifest.json"
"""Name of the file in a checkpoint's directory."""

FORMAT = "pdmpi-checkpoint"
VERSION = 1
MAX_BYTES = 256 << 20
"""A larger manifest is refused unread; 100,000 arrays take about 25 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard: its file in the checkpoint's directory, its size, and its arrays by path."""

    file: str
    size_bytes: int
    arrays: Mapping[str, ArraySpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes
    ----------
    minibatch
        Minibatches trained when it was taken.
    fingerprint
        `LayerGraph.fingerprint` of the model.
    session
        Text that all its shards share.
    created_unix_s
        When it was taken.
    state
        The run's own state, as JSON: data position, schedule step, counters, learning rate.
    shards
        By rank.
    """

    minibatch: int
    fingerprint: str
    session: str
    created_unix_s: float
    state: Mapping[str, Any] = field(default_factory=dict)
    shards: tuple[ShardEntry, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size_bytes for shard in self.shards)


def save_manifest(manifest: Manifest, directory: Path) -> None:
    """Write the manifest of a checkpoint; from then on the checkpoint is complete."""
    body = json.dumps(asdict(manifest), sort_keys=True, separators=(",", ":"))
    head = {"format": FORMAT, "version": VERSION, "sha256": hashlib.sha256(body.encode()).hexdigest()}
    write_bytes(directory / MANIFEST, f"{json.dumps(head)}\n{body}\n".encode())


def load_manifest(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises
    ------
    InputError
        It is missing, foreign, of another version, or its bytes have changed.
    """
    path = directory / MANIFEST
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path} is larger than {MAX_BYTES} bytes; it is foreign")
        head_text, _, body = path.read_text().partition("\n")
        head = json.loads(head_text)
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise InputError(f"{path} is no manifest of a checkpoint")
        if head.get("version") != VERSION:
            raise InputError(
                f"{path}: version {head.get('version')} of the checkpoint format; this pdmpi reads {VERSION}"
            )
        body = body.rstrip("\n")
        if hashlib.sha256(body.encode()).hexdigest() != head.get("sha256"):
            raise InputError(f"{path}: the bytes do not match their hash; it is damaged")
        return _decode(json.loads(body))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); the checkpoint is incomplete") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {error}") from error


def _decode(body: dict[str, Any]) -> Manifest:
    shards = []
    for entry in body["shards"]:
        if not re.fullmatch(r"shard-\d+\.h5", entry["file"]):
            raise ValueError(f"a shard cannot be named {entry['file']!r}")
        arrays = {name: _decode_spec(spec) for name, spec in entry["arrays"].items()}
        shards.append(ShardEntry(file=entry["file"], size_bytes=int(entry["size_bytes"]), arrays=arrays))
        if sum(spec.nbytes for spec in arrays.values()) > shards[-1].size_bytes:
            raise ValueError(f"the arrays of {entry['file']} are larger than the file")
    return Manifest(
        minibatch=int(body["minibatch"]),
        fingerprint=str(body["fingerprint"]),
        session=str(body["session"]),
        created_unix_s=float(body["created_unix_s"]),
        state=dict(body["state"]),
        shards=tuple(shards),
    )


def _decode_spec(spec: dict[str, Any]) -> ArraySpec:
    shape = tuple(int(size) for size in spec["shape"])
    if spec["dtype"] not in DTYPE_BYTES or min(shape, default=0) < 0:
        raise ValueError(f"no array is {spec['dtype']}{shape}")
    return ArraySpec(spec["dtype"], shape, str(spec["sha256"]))
