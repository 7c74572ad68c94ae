"""Data for the stages that read it: the first takes inputs, the last targets, without a message between them.

Both ends walk the same order, which follows from the seed and the epoch alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from pdmpi.errors import PdmpiError
from pdmpi.graph import Ref
from pdmpi.model.example import cast_floating
from pdmpi.model.keys import seed_of
from pdmpi.model.tree import map_tree
from pdmpi.runtime.ahead import read_ahead

__all__ = ["Batch", "Feed", "epoch_order", "feed", "padded_order"]


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch of data, as far as a stage reads it.

    Attributes
    ----------
    inputs
        The model's inputs.
    target
        What the loss compares the output with; None where a stage does not need it.
    """

    inputs: Mapping[Ref, Tensor]
    target: Any


Feed = Callable[[int], Batch]
"""Returns the data of a microbatch; called in the order of the stage's forwards."""


def epoch_order(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of the training samples in an epoch."""
    return np.random.default_rng((seed, epoch)).permutation(num_samples)


def padded_order(num_samples: int, microbatch_size: int) -> NDArray[np.int64]:
    """Return all samples in order, the first one repeated until whole microbatches are filled."""
    missing = -num_samples % microbatch_size
    return np.concatenate([np.arange(num_samples), np.zeros(missing, np.int64)])


def feed(
    dataset: Dataset[Any],
    order: NDArray[np.int64],
    microbatch_size: int,
    microbatches: Iterable[int],
    *,
    flatten: Callable[[Any], Mapping[Ref, Tensor]] | None,
    with_target: bool,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    first: int,
) -> Feed:
    """Return a feed over the microbatches that one replica runs.

    Parameters
    ----------
    dataset
        Map-style, of (input, target) pairs.
    order
        Sample indices; microbatch k takes ``order[k * size : (k + 1) * size]``.
    microbatch_size
        Samples in a microbatch.
    microbatches
        Numbers of the microbatches in the order of the replica's forwards.
    flatten
        Turns an input into the values of the model's input layers; None where the stage
        reads no inputs.
    with_target
        Whether the stage computes the loss.
    dtype
        Floating inputs and targets are converted to it.
    device
        Where they are put.
    seed, first
        The run's seed, and its microbatches before this program: Python's, NumPy's and torch's
        random numbers follow from them before each microbatch is fetched, so that random
        augmentations are the same at both ends, under any plan, and in a resumed run.
    """
    on_gpu = device.type == "cuda"
    fetch = _fetcher(dataset, pin=on_gpu)
    may_draw = type(dataset) is not TensorDataset
    order_of = list(microbatches)
    due = iter(order_of)

    def read(k: int) -> Any:
        if may_draw:
            _seed_everything(seed_of(seed, "data", first + k))
        return fetch(order[k * microbatch_size : (k + 1) * microbatch_size])

    # What draws random numbers reads in the thread that computes, whose numbers it would disturb.
    source = read_ahead(read, order_of) if on_gpu and not may_draw else read

    def take(k: int) -> Batch:
        expected = next(due)
        if k != expected:
            raise PdmpiError(f"the data feed is at microbatch {expected}, the program at {k}")
        value, target = source(k)
        inputs = {} if flatten is None else flatten(cast_floating(value, dtype, device))
        return Batch(inputs, cast_floating(target, dtype, device) if with_target else None)

    return take


def _pinned(leaf: Any) -> Any:
    return leaf.pin_memory() if isinstance(leaf, Tensor) else leaf


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 0.4 ms: it visits every back end


def _fetcher(dataset: Dataset[Any], *, pin: bool) -> Callable[[NDArray[np.int64]], Any]:
    """Return what takes and stacks samples as torch's `DataLoader` does, in this process.

    A dataset that takes whole batches (``__getitems__``) may stack them itself; of a
    `TensorDataset` all rows are taken at once, into pinned memory if ``pin`` is true.
    """
    if type(dataset) is TensorDataset:
        tensors = dataset.tensors
        return lambda indices: [_rows(tensor, torch.from_numpy(indices), pin) for tensor in tensors]

    def fetch(indices: NDArray[np.int64]) -> Any:
        chosen = indices.tolist()
        whole = getattr(dataset, "__getitems__", None)
        samples = [dataset[i] for i in chosen] if whole is None else whole(chosen)
        stacked = default_collate(samples) if isinstance(samples, list) else samples
        return map_tree(_pinned, stacked) if pin else stacked

    return fetch


def _rows(tensor: Tensor, indices: Tensor, pin: bool) -> Tensor:
    if not pin:
        return tensor.index_select(0, indices)
    taken = torch.empty((len(indices), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, indices, out=taken)
