"""What one call of a model does, as a list of calls between tensors.

The model runs once on ``meta`` tensors, in plain Python.  Two kinds of call are recorded:
a *leaf module* (a layer of ``torch.nn``, a submodule that the configuration names, or one
that cannot be looked into) as one opaque call, and every torch function that runs outside
of leaf modules.  Compared with ``torch.export`` this keeps the user's own modules, and
with them custom autograd functions, hooks, the switch between training and evaluation, and
the names of parameters; compared with ``torch.fx`` it lets Python branch on shapes,
unpack dictionaries and build lists, since it is Python that runs.

What the recorder cannot follow (a branch on the values of a tensor, a tensor made by
something that torch does not show) raises `CannotFollow` with the innermost submodule,
which the tracer then makes a leaf.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pdmpi.model.deferred import Tape, storage_id, written
from pdmpi.model.tree import map_tree, tensors_of

__all__ = ["Attribute", "CannotFollow", "Constant", "Node", "Recording", "Value", "record"]


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

    @property
    def reads(self) -> Iterator[Value]:
        """The values among its arguments, in order."""
        return (x for x in _leaves((self.args, self.kwargs)) if isinstance(x, Value))

    @property
    def attributes(self) -> Iterator[str]:
        """The paths of the tensors of the model among its arguments."""
        return (x.path for x in _leaves((self.args, self.kwargs)) if isinstance(x, Attribute))

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
    """

    nodes: list[Node] = field(default_factory=list)
    inputs: list[tuple[str, Any]] = field(default_factory=list)
    output: Any = None
    facts: list[Fact] = field(default_factory=list)
    glued: list[tuple[int, int]] = field(default_factory=list)


class CannotFollow(Exception):
    """The call cannot be followed inside of the module at ``path``."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(reason)
        self.path = path
        self.reason = reason


def record(
    module: nn.Module, arguments: Mapping[str, Any], is_leaf: Callable[[str, nn.Module], bool], tape: Tape
) -> Recording:
    """Run the module once on ``meta`` tensors and return what it did.

    Parameters
    ----------
    module
        Made under ``tape.recording()``.
    arguments
        Arguments of its forward by name; a name that starts with ``*`` is positional.
    is_leaf
        Whether the submodule at a path is one call.
    tape
        Knows the module's tensors.

    Raises
    ------
    CannotFollow
        Naming the innermost module that is no leaf.
    """
    recorder = _Recorder(module, is_leaf, tape)
    named = [(name, map_tree(recorder.add_input, value)) for name, value in arguments.items()]
    positional = [value for name, value in named if name.startswith("*")]
    keywords = {name: value for name, value in named if not name.startswith("*")}
    recorder.recording.inputs = [
        (name.lstrip("*"), map_tree(recorder.reference, value)) for name, value in named
    ]
    with recorder.hooks(module), recorder.observer, recorder:
        try:
            output = module(*positional, **keywords)
            recorder.recording.output = map_tree(recorder.reference, output)
        except CannotFollow:
            raise
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            raise CannotFollow(recorder.path, _where(error)) from error
    recorder.check_state()
    return recorder.recording


class _Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees below autograd: which storages are written, and whether random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random = False
        self.writes: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random = True
            kwargs.pop("generator", None)
        for tensor in written(func, args, kwargs):
            self.writes.add(storage_id(tensor))
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("the value of a tensor decides what the model does")
        tensors = tensors_of((args, kwargs))
        if any(t.device.type == "meta" for t in tensors):
            args = map_tree(_stand_in, args)
            kwargs = map_tree(_stand_in, kwargs)
        elif tensors and func is not torch.ops.aten.lift_fresh.default:
            return func(*args, **kwargs)
        if isinstance(kwargs.get("device"), torch.device) or not tensors:
            kwargs = _on_meta(func, kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            return torch.empty_like(args[0], device="meta")
        return func(*args, **kwargs)


class _Recorder(TorchFunctionMode):
    def __init__(self, module: nn.Module, is_leaf: Callable[[str, nn.Module], bool], tape: Tape) -> None:
        super().__init__()
        self.recording = Recording()
        self.observer = _Observer()
        self._is_leaf = is_leaf
        self._tape = tape
        self._values: dict[int, Value] = {}
        self._alive: list[Any] = [module]
        self._made_by: dict[int, int] = {}
        self._last_write: dict[int, tuple[int, Tensor]] = {}
        self._attributes = _attributes_of(module)
        self._attribute_storages = {storage_id(t) for t, _ in self._attributes.values()}
        self._frames: list[tuple[str, int]] = [("", 0)]
        self._calls = 0
        self._leaf: nn.Module | None = None
        self._state = _plain_state(module, is_leaf)
        self._module = module

    # -- values ---------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The innermost module that is being followed."""
        return self._frames[-1][0]

    def add_input(self, leaf: Any) -> Any:
        """Make a tensor among the arguments known as a value."""
        if not isinstance(leaf, Tensor):
            return leaf
        stand_in = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        self._new_value(stand_in)
        return stand_in

    def reference(self, leaf: Any) -> Any:
        """Return what stands for a tensor in a recorded call; other leaves are themselves."""
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self._values:
            return self._current(leaf)
        if id(leaf) in self._attributes:
            return Attribute(self._attributes[id(leaf)][1])
        if self._tape.knows(leaf) or leaf.device.type != "meta":
            return Constant(leaf)
        raise CannotFollow(self.path, "a tensor comes from code that torch does not show")

    def _current(self, tensor: Tensor) -> Value:
        """Return the tensor's value, or the newer one when its memory was written since."""
        value, node = self._values[id(tensor)], len(self.recording.nodes)
        last = self._last_write.get(storage_id(tensor))
        made = self._made_by.get(value.number, -1)
        if last is None or last[0] <= made:
            return value
        if _same_window(last[1], tensor) and id(last[1]) in self._values:
            return self._values[id(last[1])]
        self.recording.glued.append((max(made, 0), node))
        return value

    def _new_value(self, tensor: Tensor) -> Value:
        value = Value(len(self.recording.facts))
        self.recording.facts.append(
            Fact(
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                requires_grad=tensor.requires_grad,
                storage=storage_id(tensor),
            )
        )
        self._values[id(tensor)] = value
        self._made_by[value.number] = len(self.recording.nodes)
        self._alive += [tensor, tensor.untyped_storage()]
        return value

    # -- calls ----------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._leaf is not None:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__set__":
            raise CannotFollow(self.path, "a tensor's memory is replaced (.data, .grad)")
        self._observe()
        out = func(*args, **kwargs)
        if not tensors_of(out) and not self.observer.writes:
            return out
        if name == "requires_grad_" and id(args[0]) not in self._values:
            return out
        return self._add(func, args, kwargs, out)

    def _observe(self) -> None:
        self.observer.random = False
        self.observer.writes = set()

    def _add(
        self, target: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        writes = frozenset(self.observer.writes)
        if not isinstance(target, str) and writes & self._attribute_storages:
            raise CannotFollow(self.path, "it writes to its parameters or buffers in forward")
        random = self.observer.random
        reads = map_tree(self.reference, args), map_tree(self.reference, kwargs)
        arguments = tensors_of((args, kwargs))
        mutated_tensors = [t for t in arguments if storage_id(t) in writes and id(t) in self._values]
        before = {id(t): self._values[id(t)] for t in arguments if id(t) in self._values}
        changed = {id(t) for t in mutated_tensors}

        def fresh(leaf: Any) -> Any:
            known = id(leaf) in self._values or id(leaf) in self._attributes
            if isinstance(leaf, Tensor) and known and id(leaf) not in changed:
                with torch.no_grad() if not leaf.requires_grad else torch.enable_grad():
                    return leaf.view_as(leaf)
            return leaf

        out = map_tree(fresh, out)
        returned = tensors_of(out)
        results = tuple(self._new_value(t) for t in returned)
        here = {id(t) for t in returned}
        mutated = tuple(
            (before[id(t)], self._new_value(t))
            for t in {id(t): t for t in mutated_tensors}.values()
            if id(t) not in here
        )
        for tensor in mutated_tensors:
            self._last_write[storage_id(tensor)] = (len(self.recording.nodes), tensor)
        path, call = self._frames[-1]
        self.recording.nodes.append(
            Node(
                target=target, args=reads[0], kwargs=reads[1], results=results, mutated=mutated,
                owner=path, call=call, random=random, writes=writes, grad=torch.is_grad_enabled(),
            )
        )  # fmt: skip
        return out

    # -- modules --------------------------------------------------------------------------

    @contextmanager
    def hooks(self, root: nn.Module) -> Iterator[None]:
        """Watch every submodule's call from the outside of the user's own hooks."""
        handles = []
        for path, module in root.named_modules():
            leaf = self._is_leaf(path, module)
            enter = self._enter_leaf if leaf else self._enter
            leave = self._leave_leaf if leaf else self._leave
            handles.append(
                module.register_forward_pre_hook(_Bound(enter, path).pre, prepend=True, with_kwargs=True)
            )
            handles.append(module.register_forward_hook(_Bound(leave, path).post, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str, module: nn.Module) -> None:
        if self._leaf is None:
            self._calls += 1
            self._frames.append((path, self._calls))

    def _leave(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        if self._leaf is None:
            self._frames.pop()
        return None

    def _enter_leaf(self, path: str, module: nn.Module) -> None:
        if self._leaf is None:
            self._leaf = module
            self._observe()

    def _leave_leaf(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        if self._leaf is not module:
            return None
        self._leaf = None
        return self._add(path, args, kwargs, out)

    def check_state(self) -> None:
        """Refuse to look into modules that keep tensors in attributes from one call to the next."""
        for path, before in self._state.items():
            module = self._module.get_submodule(path)
            for name, value in module.__dict__.items():
                if before.get(name) != id(value) and tensors_of(value):
                    raise CannotFollow(path, f"its forward keeps a tensor in self.{name}")


@dataclass(frozen=True, slots=True)
class _Bound:
    """A hook that knows its module's path."""

    function: Callable[..., Any]
    path: str

    def pre(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function(self.path, module)

    def post(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        return self.function(self.path, module, args, kwargs, out)


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    map_tree(found.append, tree)
    return found


def _attributes_of(root: nn.Module) -> dict[int, tuple[Tensor, str]]:
    """Return the path of every parameter, buffer and plain tensor attribute, by the tensor's id."""
    found: dict[int, tuple[Tensor, str]] = {}
    for path, module in root.named_modules():
        sources = (module._parameters, module._buffers, module.__dict__)
        for name, value in ((n, v) for source in sources for n, v in source.items()):
            if isinstance(value, Tensor):
                found.setdefault(id(value), (value, f"{path}.{name}" if path else name))
    return found


def _plain_state(root: nn.Module, is_leaf: Callable[[str, nn.Module], bool]) -> dict[str, dict[str, int]]:
    inside: list[str] = []
    found = {}
    for path, module in root.named_modules():
        if any(path.startswith(f"{leaf}.") for leaf in inside):
            continue
        if is_leaf(path, module):
            inside.append(path)
        else:
            found[path] = {name: id(value) for name, value in module.__dict__.items()}
    return found


def _same_window(a: Tensor, b: Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
        and a.dtype == b.dtype
    )


def _stand_in(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.device.type != "meta":
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf


def _on_meta(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    kwargs = dict(kwargs)
    if any(argument.name == "device" for argument in func._schema.arguments):
        kwargs["device"] = torch.device("meta")
    kwargs.pop("pin_memory", None)
    return kwargs


def _where(error: BaseException) -> str:
    """Return the error with the line of the user's code that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    frames = [
        f for f in frames if not f.filename.endswith(("model/record.py", "model/trace.py", "model/tree.py"))
    ]
    place = f" ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{str(error).splitlines()[0] if str(error) else type(error).__name__}{place}"
