"""What a recording holds: calls, the values between them, and what is known of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pdmpi.model.tree import tree_leaves

__all__ = ["Attribute", "BatchSize", "CannotFollow", "Constant", "Fact", "Node", "Recording", "Value"]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that a node made, or an input of the model; numbered in the order of their making."""

    number: int


@dataclass(frozen=True, slots=True)
class Attribute:
    """A parameter, buffer or plain tensor attribute, by its path in the model."""

    path: str


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A tensor from outside of the model (a global, or one kept in a list)."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class BatchSize:
    """A Python integer that follows the number of rows of the batch: ``scale * rows + offset``."""

    scale: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """What is known of a value: its shape and kind, and its memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    storage: int


@dataclass(kw_only=True)
class Node:
    """One recorded call.

    Attributes
    ----------
    target
        Path of a leaf module, or a torch function.
    args, kwargs
        With `Value`, `Attribute` and `Constant` in the place of tensors.
    results
        The values of the tensors that it returns, in order.
    mutated
        (before, after) for each argument written in place that it does not return.
    owner, call
        Path of the module whose forward makes the call, and a number for that forward.
    random
        Whether it draws random numbers.
    writes
        Storages that it writes.
    grad
        Whether gradients were enabled.
    evaluation
        Arguments in evaluation, when they differ from those in training.
    """

    target: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Value, ...]
    mutated: tuple[tuple[Value, Value], ...]
    owner: str
    call: int
    random: bool
    writes: frozenset[int]
    grad: bool
    evaluation: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    @property
    def reads(self) -> Iterator[Value]:
        """The values among its arguments, in order."""
        return (x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Value))

    @property
    def evaluation_reads(self) -> Iterator[Value]:
        """The values among its arguments in evaluation, when these differ."""
        return (x for x in tree_leaves(self.evaluation or ()) if isinstance(x, Value))

    @property
    def attributes(self) -> Iterator[str]:
        """The paths of the tensors of the model among its arguments."""
        return (x.path for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Attribute))

    @property
    def makes(self) -> tuple[Value, ...]:
        """Every value that exists after the call and not before."""
        return (*self.results, *(after for _, after in self.mutated))


@dataclass(kw_only=True)
class Recording:
    """Everything that one call of the model did.

    Attributes
    ----------
    nodes
        In execution order.
    inputs
        (name, structure) for each argument of the model; tensors are `Value`.
    output
        The structure that the model returned.
    facts
        One entry for each value.
    glued
        Pairs of node positions that share memory in a way that must not be cut apart: one
        stage holds all nodes from the first to the second.
    run_for_real
        Leaves that do not run on ``meta`` tensors, with the reason; the shapes of their
        outputs are those of one run on made-up values.
    evaluation_output
        The structure that the model returns in evaluation; the values are those of training.
    rows
        Rows of the batch, when other numbers of rows can be run as well.
    batch_dims
        The dimension that has these rows, of each value that has one.
    """

    nodes: list[Node] = field(default_factory=list)
    inputs: list[tuple[str, Any]] = field(default_factory=list)
    output: Any = None
    facts: list[Fact] = field(default_factory=list)
    glued: list[tuple[int, int]] = field(default_factory=list)
    run_for_real: dict[str, str] = field(default_factory=dict)
    evaluation_output: Any = None
    rows: int | None = None
    batch_dims: dict[Value, int] = field(default_factory=dict)


class CannotFollow(Exception):
    """The call cannot be followed inside of the module at ``path``."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(reason)
        self.path = path
        self.reason = reason
