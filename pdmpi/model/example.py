"""The first microbatch of a run's data: what a model is traced and measured with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from pdmpi.config.run import RunConfig
from pdmpi.errors import InputError
from pdmpi.model.factory import load_factory
from pdmpi.model.tree import map_tree

__all__ = ["cast_floating", "dtype_of", "example_batch", "microbatch_size"]


def dtype_of(config: RunConfig) -> torch.dtype:
    """Return the type of parameters and activations that a run asks for."""
    found: torch.dtype = getattr(torch, config.train.dtype)
    return found


def microbatch_size(config: RunConfig) -> int:
    """Return the rows of a microbatch.

    Raises
    ------
    InputError
        When the minibatch does not divide into the microbatches asked for.
    """
    total, parts = config.train.minibatch_size, config.schedule.microbatches
    if total % parts:
        raise InputError(
            f"[train] minibatch_size = {total} does not divide into [schedule] microbatches = {parts}; "
            f"set it to {max(total // parts, 1) * parts}"
        )
    return total // parts


def cast_floating(tree: Any, dtype: torch.dtype, device: torch.device | str = "cpu") -> Any:
    """Return a batch on a device, its floating tensors as ``dtype``, integers as they are."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        wanted = dtype if leaf.is_floating_point() else leaf.dtype
        return leaf.to(device, non_blocking=True).to(wanted)  # converted there, not by the host

    return map_tree(convert, tree)


def example_batch(config: RunConfig, dataset: Any = None) -> tuple[Any, Any]:
    """Return (input, target) of the first microbatch of the training set, collated as torch does.

    The training set is made, unless it is given.

    Raises
    ------
    InputError
        When the data set fails, holds too few samples, or its samples are no pairs.
    """
    name, rows = config.data.factory, microbatch_size(config)
    factory = load_factory(name)
    try:
        if dataset is None:
            dataset = factory(split="train", **config.data.args)
        count = len(dataset)
        samples = [dataset[i] for i in range(min(rows, count))]
    except Exception as error:
        raise InputError(f"[data] factory {name!r} failed: {type(error).__name__}: {error}") from error
    if count < rows:
        raise InputError(
            f"[data] factory {name!r} holds {count} samples, a microbatch {rows}; lower minibatch_size"
        )
    if not all(isinstance(sample, (tuple, list)) and len(sample) == 2 for sample in samples):
        raise InputError(
            f"[data] factory {name!r} must give (input, target) pairs, not {type(samples[0]).__name__}"
        )
    source, target = default_collate(samples)
    return source, target
