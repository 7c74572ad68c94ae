"""Deferred initialisation: build a model without its memory, then only the tensors a rank needs.

The user's factory runs once with every tensor on torch's ``meta`` device while a tape
records each operation that writes a storage.  A rank then replays the few records behind
the tensors of its own stage.  Random operations are numbered in program order and draw
from a generator seeded by (seed, number): what is skipped changes nothing that is drawn,
so weights are the same whatever the partition.  Nothing is assumed about how weights are
initialised: constructors, ``torch.nn.init``, or code of the user's own.

Records are kept per storage rather than per tensor, so views, in-place writes, ``.data``
and tied parameters need no special treatment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pdmpi.model.generator import run_seeded_aside
from pdmpi.model.keys import seed_of
from pdmpi.model.tree import map_tree, tensors_of

__all__ = ["META", "Tape", "cast", "pretended", "storage_id", "written"]

META = torch.device("meta")


def storage_id(tensor: Tensor) -> int:
    """Return a number that two tensors share when they share memory (real or not)."""
    return int(tensor.untyped_storage()._cdata)


def written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that one aten operation writes in place, by its schema."""
    found: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += tensors_of(value)
    return found


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor as a window on a storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _View:
        return cls(
            storage_id(tensor),
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
        )


@dataclass(frozen=True, slots=True)
class _Record:
    """One operation: what it calls, the storages it reads, and those it makes."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    made: tuple[_View | None, ...]
    number: int | None = None
    constant: Tensor | None = None


@dataclass
class Tape:
    """The operations that made a model's tensors, and their replay.

    Parameters
    ----------
    seed
        Seed of every random operation.
    """

    seed: int
    _records: list[_Record] = field(default_factory=list)
    _writers: dict[int, list[int]] = field(default_factory=dict)
    _alive: list[Any] = field(default_factory=list)
    _draws: dict[int | None, int] = field(default_factory=dict)
    _generators: dict[int, torch.Generator] = field(default_factory=dict)
    _replaying: bool = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record every operation of this thread; tensors made inside live on ``meta``."""
        with _Reads(self), _Recording(self):
            yield

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory was made under `recording`."""
        return tensor.device.type == "meta" and storage_id(tensor) in self._writers

    def realise(self, tensor: Tensor, storages: dict[int, torch.UntypedStorage] | None = None) -> Tensor:
        """Return the tensor with its real contents, on the CPU.

        Parameters
        ----------
        tensor
            A tensor made under `recording`.
        storages
            Real storages by `storage_id`, filled here; share it between calls so that
            tensors that share memory still do.
        """
        if not self.knows(tensor):
            return tensor
        done = {} if storages is None else storages
        wanted, before = storage_id(tensor), self._replaying
        self._replaying = True
        try:
            if wanted not in done:
                done[wanted] = self._replay(wanted)[wanted]
            return _window(done[wanted], _View.of(tensor))
        finally:
            self._replaying = before

    def append(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: list[Tensor | None],
        writes: list[Tensor],
    ) -> None:
        """Record one operation that was run on ``meta`` tensors."""
        tensors = tensors_of((args, kwargs))
        number = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = kwargs.get("generator")
            key = None if generator is None else id(generator)
            if generator is not None:
                self._generators[id(generator)] = generator
            number = self._draws[key] = self._draws.get(key, -1) + 1
        self._push(
            _Record(
                func,
                map_tree(_frozen, args),
                map_tree(_frozen, kwargs),
                tuple(dict.fromkeys(storage_id(t) for t in tensors)),
                tuple(None if t is None else _View.of(t) for t in made),
                number,
            ),
            [t for t in made if t is not None] + writes,
        )

    def constant(self, value: Tensor) -> Tensor:
        """Record a real tensor as a constant; return its stand-in on ``meta``."""
        stand_in = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
        record = _Record(None, (), {}, (), (_View.of(stand_in),), constant=value.detach().clone())
        self._push(record, [stand_in])
        return stand_in

    def _push(self, record: _Record, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self._writers.setdefault(storage_id(tensor), []).append(len(self._records))
            self._alive.append(tensor.untyped_storage())
        self._records.append(record)

    def _behind(self, storage: int) -> list[int]:
        """Return the records that the contents of a storage depend on, in order."""
        needed: set[int] = set()
        todo = list(self._writers[storage])
        while todo:
            index = todo.pop()
            if index not in needed:
                needed.add(index)
                for read in self._records[index].reads:
                    todo += [i for i in self._writers.get(read, ()) if i < index]
        return sorted(needed)

    @torch.no_grad()
    def _replay(self, storage: int) -> dict[int, torch.UntypedStorage]:
        real: dict[int, torch.UntypedStorage] = {}
        for index in self._behind(storage):
            record = self._records[index]
            constant = record.constant
            outs = self._run(record, real) if constant is None else [constant.clone()]
            for view, out in zip(record.made, outs, strict=True):
                if view is not None:
                    real[view.storage] = _laid_out(out, view).untyped_storage()
        return real

    def _run(self, record: _Record, real: dict[int, torch.UntypedStorage]) -> list[Tensor]:
        def thaw(leaf: Any) -> Any:
            return _window(real[leaf.storage], leaf) if isinstance(leaf, _View) else leaf

        args, kwargs = map_tree(thaw, record.args), map_tree(thaw, record.kwargs)
        if record.number is not None:
            generator = kwargs.get("generator")
            if generator is not None:
                kwargs["generator"] = None
            stream = self.seed if generator is None else generator.initial_seed()
            seed = seed_of(stream, "initialisation", record.number)
            return tensors_of(run_seeded_aside(seed, partial(record.func, *args, **kwargs)))
        return tensors_of(record.func(*args, **kwargs))


def pretended(func: Callable[..., Any]) -> torch.device | bool | None:
    """Return what a getter of a ``meta`` tensor says for it to pass as one on the CPU, else None."""
    if getattr(func, "__name__", "") != "__get__":
        return None
    return _PRETENDED.get(getattr(func, "__self__", None))


_PRETENDED: Mapping[Any, torch.device | bool] = {
    Tensor.device: torch.device("cpu"),
    Tensor.is_meta: False,
    Tensor.is_cpu: True,
}


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert floating parameters and buffers in place; ties, and attributes of parameters, stay."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    done: dict[int, Tensor] = {}
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                child._buffers[name] = done.setdefault(id(buffer), buffer.to(dtype))


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operation on ``meta`` and puts those that write memory on the tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler, which takes seconds, for the sake of this mode."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tape, kwargs = self._tape, dict(kwargs or {})
        if tape._replaying:
            return func(*args, **kwargs)
        tensors = tensors_of((args, kwargs))
        if func is torch.ops.aten._local_scalar_dense.default:
            return tape.realise(args[0]).item()
        if any(t.device.type != "meta" for t in tensors):
            changes = written(func, args, kwargs)
            if any(t.device.type != "meta" for t in changes):
                return func(*map_tree(self._real, args), **map_tree(self._real, kwargs))
            args, kwargs = map_tree(self._stand_in, args), map_tree(self._stand_in, kwargs)
            tensors = tensors_of((args, kwargs))
        known = {storage_id(t) for t in tensors}
        try:
            out = func(*map_tree(_to_meta, args), **_meta_kwargs(kwargs))
        except (NotImplementedError, RuntimeError) as error:
            if not _data_dependent(error):
                raise
            out = func(*map_tree(self._real, args), **map_tree(self._real, kwargs))
            return map_tree(lambda t: tape.constant(t) if isinstance(t, Tensor) else t, out)
        outputs = tensors_of(out)
        made = [None if storage_id(t) in known else t for t in outputs]
        writes = [] if "set_" in func._schema.name.split("::")[1] else written(func, args, kwargs)
        if writes or any(t is not None for t in made):
            cpu = map_tree(_to_cpu, kwargs)
            cpu.pop("pin_memory", None)
            tape.append(func, map_tree(_to_cpu, args), cpu, made, writes)
        return out

    def _stand_in(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.device.type != "meta":
            return self._tape.constant(leaf)
        return leaf

    def _real(self, leaf: Any) -> Any:
        return self._tape.realise(leaf) if isinstance(leaf, Tensor) else leaf


class _Reads(TorchFunctionMode):
    """Gives code that reads values outside torch (``numpy``, ``tolist``) the real ones.

    Tensors say that they live on the CPU: ``torch.nn.init`` leaves ``meta`` tensors alone.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        told = pretended(func)
        if told is not None and self._tape.knows(args[0]):
            return told
        reads = getattr(func, "__name__", "") in ("numpy", "tolist", "__array__")
        if reads and self._tape.knows(args[0]):
            args = (self._tape.realise(args[0].detach()), *args[1:])
        return func(*args, **(kwargs or {}))


def _frozen(leaf: Any) -> Any:
    return _View.of(leaf) if isinstance(leaf, Tensor) else leaf


def _window(storage: torch.UntypedStorage, view: _View) -> Tensor:
    empty = torch.empty(0, dtype=view.dtype)
    return empty.set_(storage, view.offset, view.size, view.stride)


def _laid_out(out: Tensor, view: _View) -> Tensor:
    """Return ``out`` with exactly the strides that the stand-in had."""
    if out.stride() == view.stride and out.storage_offset() == view.offset:
        return out
    extent = view.offset + 1 + sum((n - 1) * s for n, s in zip(view.size, view.stride, strict=True))
    buffer = torch.empty(max(extent, 0), dtype=view.dtype)
    buffer.as_strided(view.size, view.stride, view.offset).copy_(out)
    return buffer


def _to_meta(leaf: Any) -> Any:
    return META if isinstance(leaf, torch.device) else leaf


def _to_cpu(leaf: Any) -> Any:
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _meta_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    kept = {k: map_tree(_to_meta, v) for k, v in kwargs.items() if k != "pin_memory"}
    return {**kept, "generator": None} if "generator" in kept else kept


def _data_dependent(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or "meta" in str(error)
