"""Checkpoints as tables and as JSON, and finding the one that a path means."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from pdmpi.checkpoint.arrays import split_path
from pdmpi.checkpoint.store import Checkpoint, latest, open_checkpoint
from pdmpi.cli.output import table
from pdmpi.errors import InputError
from pdmpi.plan.units import human_bytes

__all__ = ["checkpoint_data", "checkpoint_tables", "find_checkpoint"]


def find_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint at a path, or the newest good one of the run's directory that it is."""
    if not (path / "checkpoints").is_dir():
        return open_checkpoint(path)
    found = latest(path, notice=lambda line: click.echo(f"pdmpi: {line}", err=True))
    if found is None:
        raise InputError(f"run directory {path} holds no good checkpoint; train first")
    return found


def checkpoint_data(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint for ``--json``."""
    manifest = checkpoint.manifest
    return {
        "checkpoint": checkpoint.directory,
        "minibatch": manifest.minibatch,
        "created_unix_s": manifest.created_unix_s,
        "fingerprint": manifest.fingerprint,
        "state": manifest.state,
        "checkpoint_bytes": manifest.nbytes,
        "shards": [
            {"file": shard.file, "shard_bytes": shard.size_bytes, "arrays": shard.arrays}
            for shard in manifest.shards
        ],
    }


def checkpoint_tables(checkpoint: Checkpoint) -> list[Table]:
    """Return a checkpoint for people: what it is, and every parameter and buffer."""
    manifest = checkpoint.manifest
    facts = [
        ("minibatches trained", manifest.minibatch),
        ("written", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created_unix_s))),
        ("size", human_bytes(manifest.nbytes)),
        *((str(key), value) for key, value in manifest.state.items()),
    ]
    kept: dict[str, list[str]] = {}
    rows = []
    for shard in manifest.shards:
        for path, spec in shard.arrays.items():
            kind, name, *key = split_path(path)
            if kind == "optimizer":
                kept.setdefault(name, []).extend(key)
            elif kind in ("parameters", "buffers"):
                shape = "x".join(map(str, spec.shape)) or "scalar"
                rows.append((name, kind.removesuffix("s"), spec.dtype, shape, shard.file))
    arrays = [(*row[:4], ", ".join(kept.get(row[0], [])), row[4]) for row in rows]
    columns = ["name", "kind", "dtype", "shape", "optimizer state", "shard"]
    return [
        table(str(checkpoint.directory), ["what", "value"], facts),
        table("arrays", columns, arrays),
    ]
