"""The calls of one stage, compiled to registers.

A stage's forward is a list of steps over a list of registers: each step reads registers,
calls a module or a torch function, writes registers, and drops those that nobody reads
again.  All naming is resolved once, here, so that a call costs little more than the layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pdmpi.errors import InputError
from pdmpi.graph import Ref
from pdmpi.model.generator import Draw
from pdmpi.model.keys import seed_of
from pdmpi.model.recording import Attribute, BatchSize, Constant, Node, Value
from pdmpi.model.tree import map_tree, tensors_of, tree_leaves

if TYPE_CHECKING:
    from pdmpi.model.trace import TracedModel

__all__ = ["Register", "Step", "Steps", "run_steps"]

_ROWS = "rows of the batch"
"""Key of the register that holds them."""


class Register:
    """A value that a step before has left."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def get(self, registers: list[Any]) -> Any:
        """Return the value."""
        return registers[self.index]


class _Held:
    """A parameter, buffer or plain tensor of a module of the stage."""

    __slots__ = ("module", "name")

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name

    def get(self, registers: list[Any]) -> Any:
        return getattr(self.module, self.name)


class _Nested:
    """A structure with any of these inside."""

    __slots__ = ("tree",)

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def get(self, registers: list[Any]) -> Any:
        return map_tree(lambda leaf: leaf.get(registers) if isinstance(leaf, _RESOLVERS) else leaf, self.tree)


class _Rows:
    """An integer that follows the number of rows, which a register holds."""

    __slots__ = ("index", "offset", "scale")

    def __init__(self, index: int, scale: int, offset: int) -> None:
        self.index = index
        self.scale = scale
        self.offset = offset

    def get(self, registers: list[Any]) -> Any:
        return self.scale * registers[self.index] + self.offset


_RESOLVERS = (Register, _Held, _Nested, _Rows)


@dataclass(slots=True, kw_only=True)
class Step:
    """One call.

    Attributes
    ----------
    call
        Module or function.
    single
        Register of the only argument, when there is nothing else to pass.
    args, kwargs
        Literals and resolvers.
    results
        Registers for the tensors that it returns; -1 for those that nobody reads.
    moves
        (from, to): registers of arguments written in place and read again.
    clones
        Registers whose contents leave the stage and are written in place afterwards, and
        where their copies go.
    free
        Registers that nobody reads after this step.
    key
        Layer name and a number, when random numbers are drawn, each time from a fresh stream.
    dense
        Registers of arguments that are read as contiguous tensors, and whether the call writes them.
        Masks are drawn in the order of memory, which is another one where a value has crossed a boundary.
    grad
        Whether gradients are on.
    """

    call: Callable[..., Any]
    single: int | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...]
    moves: tuple[tuple[int, int], ...]
    clones: tuple[tuple[int, int], ...]
    free: tuple[int, ...]
    key: str | None
    dense: tuple[tuple[int, bool], ...]
    grad: bool

    def run(self, registers: list[Any]) -> None:
        """Run the call for any arguments and results."""
        read = registers
        if self.dense:
            read = registers.copy()
            for index, _ in self.dense:
                read[index] = read[index].contiguous()
        with nullcontext() if self.grad else torch.no_grad():
            out = self.call(
                *[a.get(read) if isinstance(a, _RESOLVERS) else a for a in self.args],
                **{k: a.get(read) if isinstance(a, _RESOLVERS) else a for k, a in self.kwargs.items()},
            )
            for index, written in self.dense:
                if written and read[index] is not registers[index]:
                    registers[index].copy_(read[index])
        tensors = tensors_of(out)
        for register, tensor in zip(self.results, tensors, strict=True):
            if register >= 0:
                registers[register] = tensor
        for source, target in self.moves:
            registers[target] = registers[source]

    def reads(self) -> Iterator[int]:
        """Yield the registers that the call reads."""
        for leaf in tree_leaves((self.args, self.kwargs)):
            inside = tree_leaves(leaf.tree if isinstance(leaf, _Nested) else leaf)
            yield from (inner.index for inner in inside if isinstance(inner, (Register, _Rows)))

    def makes(self) -> Iterator[int]:
        """Yield the registers that it writes."""
        yield from (index for index in self.results if index >= 0)
        yield from (target for _, target in (*self.moves, *self.clones))


def run_steps(
    steps: Sequence[Step], registers: list[Any], draw: Callable[[str, Callable[[], None]], None] | None = None
) -> None:
    """Run steps in order; ``draw`` runs those that draw random numbers."""
    for step in steps:
        if step.key is not None:
            assert draw is not None
            draw(step.key, partial(step.run, registers))
        elif step.single is not None:
            registers[step.results[0]] = step.call(registers[step.single])
        else:
            step.run(registers)
        for source, target in step.clones:
            registers[target] = registers[source].clone()
        for index in step.free:
            registers[index] = None


@dataclass(slots=True, kw_only=True)
class Steps:
    """A stage's calls in order, and how values get in and out."""

    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    num_registers: int
    loads: tuple[tuple[int, Ref, bool], ...]
    stores: tuple[tuple[Ref, int], ...]
    steps: tuple[Step, ...]
    evaluation: tuple[Step, ...]
    rows: tuple[int, Ref, int] | None
    seed: int

    @classmethod
    def compile(
        cls,
        traced: TracedModel,
        order: Sequence[str],
        *,
        is_last: bool,
        seed: int,
        device: torch.device,
        modules: Mapping[str, nn.Module],
        tensors: Mapping[str, tuple[nn.Module, str]],
        constant: Callable[[Tensor], Tensor],
    ) -> Steps:
        """Compile the calls of the layers in ``order``."""
        inputs, outputs = traced.boundary(order, is_last=is_last)
        return _Compiler(traced, order, device, modules, tensors, constant).compile(inputs, outputs, seed)

    def seeds(self, microbatch: int) -> dict[str, int]:
        """Return the seed of each draw of a training microbatch, by key."""
        keys = [step.key for step in self.steps if step.key is not None]
        return {key: seed_of(self.seed, key, microbatch) for key in keys}

    def run(
        self, values: Mapping[Ref, Tensor], microbatch: int, training: bool, draw: Draw
    ) -> dict[Ref, Tensor]:
        """Run every step; see `StageModule.forward`."""
        registers: list[Any] = [None] * self.num_registers
        for index, ref, clone in self.loads:
            registers[index] = values[ref].clone() if clone else values[ref]
        if self.rows is not None:
            index, ref, dim = self.rows
            registers[index] = values[ref].shape[dim]
        run_steps(
            self.steps if training else self.evaluation,
            registers,
            lambda key, call: draw(key, seed_of(self.seed, key, microbatch), call),
        )
        return {ref: registers[index].contiguous() for ref, index in self.stores}


class _Compiler:
    """Assigns registers to values, and turns nodes into steps."""

    def __init__(
        self,
        traced: TracedModel,
        order: Sequence[str],
        device: torch.device,
        modules: Mapping[str, nn.Module],
        tensors: Mapping[str, tuple[nn.Module, str]],
        constant: Callable[[Tensor], Tensor],
    ) -> None:
        self._traced = traced
        self._nodes = traced.recording.nodes
        self._device = device
        self._modules = modules
        self._tensors = tensors
        self._constant = constant
        self._registers: dict[Value | Ref | str, int] = {}
        calls = [(name, i) for name in order for i in traced.members[name]]
        self._written = frozenset[int]().union(*(self._nodes[i].writes for _, i in calls))
        self._calls = self._without_repeats(calls)

    def _without_repeats(self, calls: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Drop constants that an earlier layer has made already, unless some layer writes to them."""
        done: set[int] = set()
        kept = []
        for name, i in calls:
            if i not in done or any(self._storage(v) in self._written for v in self._nodes[i].makes):
                kept.append((name, i))
            done.add(i)
        return kept

    def compile(self, inputs: tuple[Ref, ...], outputs: tuple[Ref, ...], seed: int) -> Steps:
        """Return the steps between these inputs and outputs."""
        value_of = self._traced.value_of
        loads = tuple(
            (self._register(value_of[ref]), ref, self._storage(value_of[ref]) in self._written)
            for ref in inputs
        )
        copies = {
            ref: made for ref in outputs if ref not in inputs and (made := self._overwritten(ref)) is not None
        }
        stores = tuple(
            (ref, self._register(ref) if ref in copies else self._register(value_of[ref])) for ref in outputs
        )
        last_read: dict[int, int] = {}
        for c, (_, i) in enumerate(self._calls):
            for value in (*self._nodes[i].reads, *self._nodes[i].evaluation_reads):
                last_read[self._register(value)] = c
        stored = {register for _, register in stores}
        wanted = last_read.keys() | stored | {self._register(value_of[ref]) for ref in copies}
        steps, evaluation, draws = list[Step](), list[Step](), Counter[str]()
        for c, (name, i) in enumerate(self._calls):
            node = self._nodes[i]
            clones = tuple(
                (self._register(value_of[ref]), self._register(ref)) for ref, at in copies.items() if at == c
            )
            over = {r for r, last in last_read.items() if last == c} | {
                r for r, _ in clones if r not in last_read
            }
            draws[name] += node.random
            key = f"{name}/{draws[name]}" if node.random else None
            free = tuple(sorted(over - stored))
            steps.append(self._step(node, key, wanted, clones, free))
            if node.evaluation is None:
                evaluation.append(steps[-1])
            else:
                args, kwargs = node.evaluation
                node = replace(node, args=args, kwargs=kwargs)
                evaluation.append(self._step(node, key, wanted, clones, free))
        return Steps(
            inputs=inputs,
            outputs=outputs,
            loads=loads,
            stores=stores,
            steps=tuple(steps),
            evaluation=tuple(evaluation),
            rows=self._rows(inputs),
            num_registers=len(self._registers),
            seed=seed,
        )

    def _rows(self, inputs: tuple[Ref, ...]) -> tuple[int, Ref, int] | None:
        """Return the register for the number of rows, and the input and dimension that tell it."""
        if _ROWS not in self._registers:
            return None
        dims = self._traced.recording.batch_dims
        known = (
            (ref, dims[value])
            for ref, value in ((r, self._traced.value_of[r]) for r in inputs)
            if value in dims
        )
        ref, dim = next(known, (None, 0))
        if ref is None:
            raise InputError(
                "a stage depends on the number of rows of the batch, and none of its inputs has it"
            )
        return self._registers[_ROWS], ref, dim

    def _register(self, value: Value | Ref | str) -> int:
        return self._registers.setdefault(value, len(self._registers))

    def _storage(self, value: Value) -> int:
        return self._traced.recording.facts[value.number].storage

    def _overwritten(self, ref: Ref) -> int | None:
        """Return the call that makes a value which a later layer of the stage writes in place."""
        value = self._traced.value_of[ref]
        made = max(c for c, (_, i) in enumerate(self._calls) if value in self._nodes[i].makes)
        layer = self._calls[made][0]
        later = (i for name, i in self._calls[made + 1 :] if name != layer)
        return made if any(self._storage(value) in self._nodes[i].writes for i in later) else None

    def _step(
        self,
        node: Node,
        key: str | None,
        wanted: Set[int],
        clones: tuple[tuple[int, int], ...],
        free: tuple[int, ...],
    ) -> Step:
        results = tuple(self._register(v) for v in node.results)
        moves = tuple((self._register(a), self._register(b)) for a, b in node.mutated)
        alone = len(node.args) == 1 and isinstance(node.args[0], Value) and not node.kwargs
        plain = alone and len(results) == 1 and not moves and node.grad
        return Step(
            call=self._modules[node.target] if isinstance(node.target, str) else node.target,
            single=self._register(node.args[0]) if plain else None,
            args=tuple(self._argument(a) for a in node.args),
            kwargs={k: self._argument(a) for k, a in node.kwargs.items()},
            results=tuple(r if plain or r in wanted else -1 for r in results),
            moves=tuple((a, b) for a, b in moves if b in wanted),
            clones=clones,
            free=free if results[:1] == () or results[0] in wanted or not plain else (*free, results[0]),
            key=key,
            dense=self._dense(node) if key else (),
            grad=node.grad,
        )

    def _dense(self, node: Node) -> tuple[tuple[int, bool], ...]:
        read = dict.fromkeys(node.reads)
        return tuple((self._register(v), self._storage(v) in node.writes) for v in read)

    def _argument(self, tree: Any) -> Any:
        bound = map_tree(self._bind, tree)
        if isinstance(bound, _RESOLVERS) or not any(
            isinstance(leaf, _RESOLVERS) for leaf in tree_leaves(bound)
        ):
            return bound
        return _Nested(bound)

    def _bind(self, leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return Register(self._register(leaf))
        if isinstance(leaf, BatchSize):
            return _Rows(self._register(_ROWS), leaf.scale, leaf.offset)
        if isinstance(leaf, Attribute):
            return _Held(*self._tensors[leaf.path])
        if isinstance(leaf, Constant):
            return self._constant(leaf.tensor)
        return self._device if isinstance(leaf, torch.device) else leaf
