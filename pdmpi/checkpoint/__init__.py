"""Checkpoints keyed by layer: write, verify, resume, re-shard, export."""

from pdmpi.checkpoint.arrays import Array, Snapshot
from pdmpi.checkpoint.store import Checkpoint, latest, open_checkpoint
from pdmpi.checkpoint.writer import CheckpointWriter

__all__ = ["Array", "Checkpoint", "CheckpointWriter", "Snapshot", "latest", "open_checkpoint"]
