"""The checkpoints of a run: list them, verify them, find the newest good one, read by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pdmpi.checkpoint.arrays import Array, Snapshot, split_path
from pdmpi.checkpoint.manifest import MANIFEST, Manifest, ShardEntry, load_manifest
from pdmpi.checkpoint.shard import ArraySpec, read_shard
from pdmpi.errors import InputError

__all__ = ["Alone", "Checkpoint", "Collective", "latest", "open_checkpoint", "prune"]

_NAME = re.compile(r"step-(\d{12})")


class Collective(Protocol):
    """The ranks that share a run; every `pdmpi.transport.base.Transport` is one."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def broadcast(self, data: bytes, root: int = 0) -> bytes:
        """Return ``root``'s bytes on every rank."""

    def gather(self, data: bytes, root: int = 0) -> list[bytes]:
        """Return every rank's bytes on ``root``."""


class Alone:
    """The collective of a process that is by itself."""

    rank = 0
    size = 1

    def broadcast(self, data: bytes, root: int = 0) -> bytes:
        """Return the bytes."""
        return data

    def gather(self, data: bytes, root: int = 0) -> list[bytes]:
        """Return the bytes, in a list."""
        return [data]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    directory: Path
    manifest: Manifest

    def verify(self, rank: int = 0, size: int = 1) -> list[str]:
        """Read every ``size``-th shard from shard ``rank`` on and return what is wrong with them."""
        problems = []
        for shard in self.manifest.shards[rank::size]:
            try:
                for _ in self._read(shard, shard.arrays):
                    pass
            except InputError as error:
                problems.append(str(error))
        return problems

    @property
    def names(self) -> frozenset[str]:
        """Names of all parameters and buffers."""
        paths = (split_path(path) for shard in self.manifest.shards for path in shard.arrays)
        return frozenset(parts[1] for parts in paths if parts[0] in ("parameters", "buffers"))

    def read(self, names: Collection[str], *, replica: int = 0) -> Snapshot:
        """Read the state of some of the model's parameters and buffers, whatever ranks wrote them.

        Parameters
        ----------
        names
            Names of the model's ``state_dict``.
        replica
            Replica of the stage, for buffers in which replicas differ; one that the
            checkpoint does not know gets the first replica's.

        Raises
        ------
        InputError
            A name is not in the checkpoint, or its bytes have changed.
        """
        wanted = frozenset(names)
        missing = sorted(wanted - self.names)
        if missing:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise InputError(
                f"checkpoint {self.directory} holds no {shown}; it belongs to another model:"
                " resume with the model it was made with, or start with --resume none"
            )

        def takes(path: str) -> bool:
            match split_path(path):
                case ("replicas", index, name):
                    return index == str(replica) and name in wanted
                case (_, name, *_):
                    return name in wanted
            return False

        seen: set[str] = set()
        items: list[tuple[str, Array]] = []
        for shard in self.manifest.shards:
            chosen = {p: spec for p, spec in shard.arrays.items() if p not in seen and takes(p)}
            seen.update(chosen)
            if chosen:
                items += self._read(shard, chosen)
        found = Snapshot.from_items(items)
        if replica not in found.replica_buffers:
            return found
        return Snapshot(
            parameters=found.parameters,
            optimizer=found.optimizer,
            buffers={**found.buffers, **found.replica_buffers[replica]},
        )

    def array(self, path: str) -> Array:
        """Read one array by its path in the checkpoint, ``parameters/conv1.weight``."""
        for shard in self.manifest.shards:
            if path in shard.arrays:
                return next(self._read(shard, {path: shard.arrays[path]}))[1]
        raise InputError(f"checkpoint {self.directory} holds no {path!r}")

    def _read(self, shard: ShardEntry, specs: Mapping[str, ArraySpec]) -> Iterator[tuple[str, Array]]:
        path = self.directory / shard.file
        try:
            size = path.stat().st_size
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
        if size != shard.size_bytes:
            raise InputError(f"{path} has {size} bytes, the manifest says {shard.size_bytes}; it is damaged")
        yield from read_shard(path, specs, self.manifest.session)


def directory_of(run_dir: Path, minibatch: int) -> Path:
    """Return where the checkpoint of a minibatch lives."""
    return run_dir / "checkpoints" / f"step-{minibatch:012d}"


def listed(run_dir: Path) -> list[Path]:
    """Return the directories of complete checkpoints, newest first."""
    folder = run_dir / "checkpoints"
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: path.name, reverse=True)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open one checkpoint by its directory, or by its manifest."""
    directory = path.parent if path.name == MANIFEST else path
    if not directory.is_dir():
        raise InputError(f"checkpoint {path} does not exist")
    return Checkpoint(directory, load_manifest(directory))


def latest(
    run_dir: Path, group: Collective | None = None, notice: Callable[[str], None] = lambda _: None
) -> Checkpoint | None:
    """Find the newest checkpoint whose every byte is right; all ranks of ``group`` get the same.

    Parameters
    ----------
    run_dir
        The run's directory.
    group
        Ranks that share the work of verifying; alone by default.
    notice
        Called on rank 0 with one line for each damaged checkpoint that is passed over.

    Returns
    -------
    Checkpoint or None
        None when the run has no good checkpoint.
    """
    group = group or Alone()
    names = json.loads(group.broadcast(json.dumps([p.name for p in listed(run_dir)]).encode()))
    for name in names:
        problems = []
        checkpoint = None
        try:
            checkpoint = open_checkpoint(run_dir / "checkpoints" / name)
            problems = checkpoint.verify(group.rank, group.size)
        except InputError as error:
            problems = [str(error)]
        told = [line for part in group.gather(json.dumps(problems).encode()) for line in json.loads(part)]
        for line in dict.fromkeys(told):
            notice(f"checkpoint {name} is passed over: {line}")
        if json.loads(group.broadcast(json.dumps(not told).encode())):
            return checkpoint
    return None


def prune(run_dir: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints; called by one rank only."""
    for path in listed(run_dir)[keep:]:
        discard(path)


def discard(path: Path) -> None:
    """Remove a checkpoint: it stops to be one at once, then its files go."""
    doomed = path.with_name(f".old-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
