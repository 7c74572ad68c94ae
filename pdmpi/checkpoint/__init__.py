"""Checkpoints keyed by layer: write, verify, resume, re-shard, export."""
