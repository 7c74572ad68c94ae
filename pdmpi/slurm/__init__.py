"""Batch scripts as pure functions, job environment, signals and requeue."""
