"""Write checkpoints while training goes on.

Every rank that owns state copies it (the only time that training waits), and a thread of
its own writes the copy as a shard.  Rank 0's thread then waits for all shards to appear in
the shared directory, writes the manifest, and renames the directory to its final name:
there is no moment at which a half-written checkpoint looks like one, and none at which a
thread calls MPI.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdmpi.checkpoint.arrays import Array, Snapshot
from pdmpi.checkpoint.files import free_bytes, sync_directory, write_bytes
from pdmpi.checkpoint.manifest import Manifest, ShardEntry, save_manifest
from pdmpi.checkpoint.shard import ArraySpec, read_specs, write_shard
from pdmpi.checkpoint.store import Collective, directory_of, discard, listed, prune
from pdmpi.errors import InputError

__all__ = ["CheckpointWriter"]

_VISIBLE_S = 120.0
"""Seconds within which a file that one host wrote must be seen by another (NFS caches names for a minute)."""

_SPARE_BYTES = 16 << 20
"""Left free beside a checkpoint: metrics and logs must still be written."""


@dataclass
class _Job:
    """One checkpoint on its way to the disk."""

    minibatch: int
    session: str
    directory: Path
    started_s: float
    state: Mapping[str, Any]
    snapshot: Snapshot | None
    shard_done: threading.Event = field(default_factory=threading.Event)
    abandoned: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    error: str = ""
    duration_s: float = 0.0


class CheckpointWriter:
    """Writes the checkpoints of one run; every method is called by all ranks together.

    Parameters
    ----------
    run_dir
        The run's directory, on a file system that all ranks share.
    group
        The ranks.
    writers
        Ranks that pass a snapshot to `save`.
    fingerprint
        `LayerGraph.fingerprint` of the model.
    keep
        Checkpoints to keep.
    start
        Minibatch at which this run starts.  Newer checkpoints, of a course of training
        that is being given up, are set aside under ``superseded-*``.
    notice
        Called on rank 0 with one line for whatever a person should know.

    Raises
    ------
    InputError
        The directory cannot be written, or is not the same on all hosts.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        group: Collective,
        writers: Collection[int],
        fingerprint: str,
        keep: int = 2,
        start: int = 0,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._run_dir = run_dir
        self._group = group
        self._writers = tuple(sorted(writers))
        self._fingerprint = fingerprint
        self._keep = keep
        self._notice = notice
        self._job: _Job | None = None
        self._copies: dict[str, NDArray[np.generic]] = {}
        self._duration_s = 0.0
        self._stall_s = 0.0
        self._prepare(start)

    @property
    def writers(self) -> tuple[int, ...]:
        """Ranks that pass a snapshot."""
        return self._writers

    @property
    def duration_s(self) -> float:
        """Seconds of the last complete checkpoint from `save` to its final name; equal on all ranks."""
        return self._duration_s

    @property
    def stall_s(self) -> float:
        """Seconds that this rank has spent inside `save` and `finish` so far."""
        return self._stall_s

    def save(self, minibatch: int, snapshot: Snapshot | None, state: Mapping[str, Any]) -> bool:
        """Start to write a checkpoint; returns when the arrays are copied.

        Parameters
        ----------
        minibatch
            Minibatches trained so far.
        snapshot
            This rank's arrays; None on ranks that are no writers.
        state
            The run's own state, JSON-able; rank 0's counts.

        Returns
        -------
        bool
            Whether it was started; False when the disk has no room for it, which is told by ``notice``.
        """
        self.finish()
        begun = time.perf_counter()
        if (snapshot is None) == (self._group.rank in self._writers):
            raise ValueError(f"rank {self._group.rank} passes a snapshot if and only if it is a writer")
        directory = self._folder / f".writing-{minibatch:012d}-{self._session}"
        needed = snapshot.nbytes if snapshot else 0
        sizes = self._group.gather(str(needed).encode())
        refusal = self._make_room(directory, sum(map(int, sizes))) if self._group.rank == 0 else ""
        refusal = self._group.broadcast(refusal.encode()).decode()
        if refusal:
            self._tell(minibatch, refusal)
            return False
        self._job = _Job(
            minibatch=minibatch,
            session=f"{self._session}-{minibatch}",
            directory=directory,
            started_s=begun,
            state=json.loads(json.dumps(state)),
            snapshot=self._copy(snapshot) if snapshot else None,
        )
        self._job.thread = threading.Thread(
            target=self._run, args=(self._job,), name="checkpoint-writer", daemon=True
        )
        self._job.thread.start()
        self._stall_s += time.perf_counter() - begun
        return True

    def finish(self) -> Path | None:
        """Wait for the checkpoint that is being written.

        Returns
        -------
        Path or None
            Its directory; None if it was lost, or if there was none.
        """
        job, self._job = self._job, None
        if job is None or job.thread is None:
            return None
        begun = time.perf_counter()
        job.shard_done.wait()
        errors = [text.decode() for text in self._group.gather(job.error.encode()) if text]
        outcome = b""
        if self._group.rank == 0:
            if errors:
                job.abandoned.set()
            job.thread.join()
            errors = errors or [job.error] * bool(job.error)
            if errors:
                shutil.rmtree(job.directory, ignore_errors=True)
            outcome = json.dumps([errors, job.duration_s]).encode()
        job.thread.join()
        errors, duration_s = json.loads(self._group.broadcast(outcome))
        self._stall_s += time.perf_counter() - begun
        if errors:
            self._tell(job.minibatch, "; ".join(dict.fromkeys(errors)))
            return None
        self._duration_s = duration_s
        return directory_of(self._run_dir, job.minibatch)

    def _prepare(self, start: int) -> None:
        """Clear what a killed run left, agree on a session, and see that all hosts see one directory."""
        problem, probe = "", self._folder / f".seen-{os.getpid()}"
        session = uuid.uuid4().hex[:16]
        if self._group.rank == 0:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                for path in [*self._folder.glob(".writing-*"), *self._folder.glob(".old-*")]:
                    shutil.rmtree(path, ignore_errors=True)
                for path in self._folder.glob(".seen-*"):
                    path.unlink()
                self._set_aside(start)
                write_bytes(probe, session.encode())
            except OSError as error:
                problem = (
                    f"run directory {self._run_dir} cannot be written ({error.strerror});"
                    " choose another --run-dir"
                )
        told = json.loads(self._group.broadcast(json.dumps([problem, session, probe.name]).encode()))
        problem, self._session, name = told
        if not problem and not _appears(self._folder / name):
            problem = (
                f"run directory {self._run_dir} of rank {self._group.rank} is not the one that rank 0 sees;"
                " choose a --run-dir on a file system that all hosts share"
            )
        problems = {text.decode() for text in self._group.gather(problem.encode())} - {""}
        problems = json.loads(self._group.broadcast(json.dumps(sorted(problems)).encode()))
        if self._group.rank == 0 and probe.exists():
            probe.unlink()
        InputError.collect(problems)

    @property
    def _folder(self) -> Path:
        return self._run_dir / "checkpoints"

    def _set_aside(self, start: int) -> None:
        for path in listed(self._run_dir):
            if path > directory_of(self._run_dir, start):
                target = path.with_name(f"superseded-{path.name}")
                shutil.rmtree(target, ignore_errors=True)
                path.rename(target)
                self._notice(f"checkpoint {path.name} is newer than this start: set aside as {target.name}")

    def _make_room(self, directory: Path, needed: int) -> str:
        """Make the directory if the disk has room; return why not."""
        try:
            free = free_bytes(self._folder)
            if free < needed + _SPARE_BYTES:
                return f"it needs {needed} bytes and {_SPARE_BYTES} to spare, {self._folder} has {free} free"
            directory.mkdir()
        except OSError as error:
            return f"{self._folder}: {error.strerror}"
        return ""

    def _copy(self, snapshot: Snapshot) -> Snapshot:
        """Copy into the buffers of the last checkpoint: fresh pages cost more than the copying."""

        def copied(path: str, array: Array) -> Array:
            kept = self._copies.get(path)
            if kept is None or kept.shape != array.shape or kept.dtype != array.bits.dtype:
                kept = self._copies[path] = np.empty(array.shape, array.bits.dtype)
            np.copyto(kept, array.bits)
            return Array(kept, array.dtype)

        return Snapshot.from_items((path, copied(path, array)) for path, array in snapshot.items())

    def _run(self, job: _Job) -> None:
        """Body of the writer's thread: this rank's shard; on rank 0 then the manifest."""
        mine: dict[str, ArraySpec] = {}
        try:
            if job.snapshot is not None:
                path = job.directory / _file_of(self._group.rank)
                mine = write_shard(path, job.snapshot, job.session)
        except Exception as error:
            job.error = f"rank {self._group.rank}: {error}"
        job.shard_done.set()
        if self._group.rank == 0 and not job.error:
            try:
                self._complete(job, mine)
            except Exception as error:
                job.error = f"rank 0: {error}"

    def _complete(self, job: _Job, mine: Mapping[str, ArraySpec]) -> None:
        shards = []
        for rank in self._writers:
            path = job.directory / _file_of(rank)
            if not _appears(path, job.abandoned):
                raise OSError(f"the shard of rank {rank} did not appear in {job.directory}")
            arrays = mine if rank == self._group.rank else read_specs(path, job.session)
            shards.append(ShardEntry(file=path.name, size_bytes=path.stat().st_size, arrays=arrays))
        manifest = Manifest(
            minibatch=job.minibatch,
            fingerprint=self._fingerprint,
            session=job.session,
            created_unix_s=time.time(),
            state=job.state,
            shards=tuple(shards),
        )
        save_manifest(manifest, job.directory)
        final = directory_of(self._run_dir, job.minibatch)
        if final.exists():
            discard(final)
        job.directory.rename(final)
        sync_directory(self._folder)
        job.duration_s = time.perf_counter() - job.started_s
        prune(self._run_dir, self._keep)

    def _tell(self, minibatch: int, reason: str) -> None:
        if self._group.rank == 0:
            self._notice(f"the checkpoint of minibatch {minibatch} is lost, earlier ones are kept: {reason}")


def _file_of(rank: int) -> str:
    return f"shard-{rank:05d}.h5"


def _appears(path: Path, abandoned: threading.Event | None = None) -> bool:
    """Wait until a file that another rank writes is seen here."""
    abandoned = abandoned or threading.Event()
    pause_s, deadline = 0.005, time.monotonic() + _VISIBLE_S
    while not path.exists():
        if time.monotonic() > deadline or abandoned.wait(pause_s):
            return False
        pause_s = min(1.5 * pause_s, 0.5)
    return True
