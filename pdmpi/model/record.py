"""Recording what one call of a model does, as a list of calls between tensors.

The model runs once on ``meta`` tensors, in plain Python.  Two kinds of call are recorded:
a *leaf module* (a layer of ``torch.nn``, a submodule that the configuration names, or one
that cannot be looked into) as one opaque call, and every torch function that runs outside
of leaf modules.  Compared with ``torch.export`` this keeps the user's own modules, and
with them custom autograd functions, hooks, the switch between training and evaluation, and
the names of parameters; compared with ``torch.fx`` it lets Python branch on shapes,
unpack dictionaries and build lists, since it is Python that runs.

What the recorder cannot follow (a branch on the values of a tensor, a tensor made by
something that torch does not show) raises `CannotFollow` with the innermost submodule,
which the tracer then makes a leaf.  A leaf that cannot run on ``meta`` tensors runs once on
real ones, for the shapes of its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pdmpi.errors import InputError
from pdmpi.model.attributes import Snapshot, tensor_paths
from pdmpi.model.constants import Constants
from pdmpi.model.deferred import Tape, pretended, storage_id
from pdmpi.model.materialise import Materialiser
from pdmpi.model.meta import Observer, OneStep, place_of, stand_in
from pdmpi.model.recording import Attribute, CannotFollow, Constant, Fact, Node, Recording, Value
from pdmpi.model.tree import map_tree, tensors_of

__all__ = ["record"]

_ERRORS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, KeyError, AttributeError)


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
    InputError
        When a leaf does not run on real tensors either.
    """
    recorder = _Recorder(module, is_leaf, tape)
    named = [(name, map_tree(recorder.add_input, value)) for name, value in arguments.items()]
    positional = [value for name, value in named if name.startswith("*")]
    keywords = {name: value for name, value in named if not name.startswith("*")}
    recorder.recording.inputs = [
        (name.lstrip("*"), map_tree(recorder.reference, value)) for name, value in named
    ]
    with recorder.watching(), recorder.observer, recorder:
        try:
            output = module(*positional, **keywords)
        except _ERRORS as error:
            raise CannotFollow(recorder.path, place_of(error)) from error
        with recorder.unseen():
            recorder.recording.output = map_tree(recorder.reference, output)
            recorder.check_state()
    return recorder.recording


class _Recorder(TorchFunctionMode):
    def __init__(self, module: nn.Module, is_leaf: Callable[[str, nn.Module], bool], tape: Tape) -> None:
        super().__init__()
        self.recording = Recording()
        self.observer = Observer()
        self._module = module
        self._is_leaf = is_leaf
        self._tape = tape
        self._values: dict[int, Value] = {}
        self._alive: list[Any] = []
        self._made_by: dict[int, int] = {}
        self._last_write: dict[int, tuple[int, Tensor]] = {}
        self._attributes = tensor_paths(module)
        self._attribute_storages = {storage_id(t) for t, _ in self._attributes.values()}
        self._snapshot = Snapshot(module)
        self._followed: list[str] = []
        self._frames: list[tuple[str, int]] = [("", 0)]
        self._calls = 0
        self._leaf: nn.Module | None = None
        self._unseen = False
        self._autocast = _autocast()
        self._constants = Constants(self.recording, module, tape)

    @property
    def path(self) -> str:
        """The innermost module that is being followed."""
        return self._frames[-1][0]

    # -- values ---------------------------------------------------------------------------

    def add_input(self, leaf: Any) -> Any:
        """Make a tensor among the arguments known as a value."""
        if isinstance(leaf, Tensor):
            leaf = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
            self._new_value(leaf)
        return leaf

    def reference(self, leaf: Any) -> Any:
        """Return what stands for a tensor in a recorded call; other leaves are themselves."""
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self._values:
            return self._current(leaf)
        if id(leaf) in self._attributes:
            return Attribute(self._attributes[id(leaf)][1])
        if self._tape.knows(leaf) or leaf.device.type != "meta":
            self._alive.append(leaf)
            return Constant(leaf)
        raise CannotFollow(self.path, "a tensor comes from code that torch does not show")

    def _current(self, tensor: Tensor) -> Value:
        """Return the tensor's value, or the newer one when its memory was written since."""
        value = self._values[id(tensor)]
        made = self._made_by[value.number]
        written_by, newest = self._last_write.get(storage_id(tensor), (-1, tensor))
        if written_by <= made:
            same = tensor.requires_grad == self.recording.facts[value.number].requires_grad
            if not same and storage_id(tensor) not in self.observer.writes:
                makers = self.recording.nodes[made : made + 1]
                owner = makers[0].owner if makers else self.path
                raise CannotFollow(owner, "a custom autograd function computes a tensor")
            return value
        if _same_window(newest, tensor):
            return self._values[id(newest)]
        self.recording.glued.append((max(made, 0), len(self.recording.nodes)))
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
        if self._unseen:
            return func(*args, **kwargs)
        told = pretended(func)
        if told is not None:
            return told
        if self._leaf is not None:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__set__":
            raise CannotFollow(self.path, "a tensor's memory is replaced (.data or .grad is assigned)")
        self.observer.reset()
        try:
            out = func(*args, **kwargs)
        except _ERRORS:
            out = self._from_constants(func, args, kwargs)
        silent = not tensors_of(out) and not self.observer.writes
        return out if silent else self._add(func, args, kwargs, out)

    def _from_constants(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function again on real tensors when it depends on constants alone."""
        self.observer.real = True
        try:
            real = self._constants.real(map_tree(self.reference, (args, kwargs)))
            if real is None:
                raise
            return map_tree(stand_in, func(*real[0], **real[1]))
        finally:
            self.observer.real = False

    def _add(
        self, target: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        writes, random = frozenset(self.observer.writes), self.observer.random
        if not isinstance(target, str) and writes & self._attribute_storages:
            raise CannotFollow(self.path, "its forward writes to its parameters or buffers")
        if _autocast() != self._autocast:
            raise CannotFollow(self.path, "its forward switches autocast")
        reads = map_tree(self.reference, args), map_tree(self.reference, kwargs)
        known = {id(t): t for t in tensors_of((args, kwargs)) if id(t) in self._values}
        before = {i: self._values[i] for i in known}
        changed = {i: t for i, t in known.items() if storage_id(t) in writes}

        def fresh(leaf: Any) -> Any:
            """Give a tensor that is returned as it came a name of its own."""
            old = id(leaf) in self._values or id(leaf) in self._attributes
            if not isinstance(leaf, Tensor) or not old or id(leaf) in changed:
                return leaf
            with nullcontext() if leaf.requires_grad else torch.no_grad():
                return leaf.view_as(leaf)

        out = map_tree(fresh, out)
        returned = tensors_of(out)
        results = tuple(self._new_value(t) for t in returned)
        kept = changed.keys() - {id(t) for t in returned}
        mutated = tuple((before[i], self._new_value(changed[i])) for i in changed if i in kept)
        for tensor in changed.values():
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
    def watching(self) -> Iterator[None]:
        """Watch every submodule's call from the outside of the user's own hooks."""
        inside: set[nn.Module] = set()
        try:
            for path, module in self._module.named_modules():
                if isinstance(module, nn.RNNBase):
                    module.__dict__["forward"] = OneStep(module)
                if module in inside:
                    continue
                leaf = self._is_leaf(path, module)
                hooks = _Hooks(self, path)
                before, after = (hooks.enter_leaf, hooks.leave_leaf) if leaf else (hooks.enter, hooks.leave)
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
                module.register_forward_hook(after, with_kwargs=True)
                if leaf:
                    inside.update(module.modules())
                    module.__dict__["forward"] = _Guarded(self, path, module.forward)
                else:
                    self._followed.append(path)
            yield
        finally:
            self._snapshot.restore()

    def enter(self, path: str) -> None:
        """A module that is no leaf is called."""
        self._calls += 1
        self._frames.append((path, self._calls))

    def leave(self) -> None:
        """It returns."""
        self._frames.pop()

    def enter_leaf(self, path: str, module: nn.Module) -> None:
        """A leaf is called."""
        if self._snapshot.swapped(path):
            raise CannotFollow(self.path, f"it calls {path!r} with other parameters than its own")
        self._leaf = module
        self.observer.reset()

    def leave_leaf(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """It returns ``out``."""
        with self.unseen():
            out = self._add(path, args, kwargs, out)
        self._leaf = None
        return out

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Let the recorder's own work with tensors go unrecorded."""
        self._unseen, before = True, self._unseen
        try:
            yield
        finally:
            self._unseen = before

    def run_for_real(
        self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], reason: BaseException
    ) -> Any:
        """Run a leaf that refuses ``meta`` tensors on made-up real ones."""
        back: dict[int, Tensor] = {}

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            made = torch.randn(leaf.shape).to(leaf.dtype) if leaf.is_floating_point() else None
            made = torch.zeros(leaf.shape, dtype=leaf.dtype) if made is None else made
            back[id(made.requires_grad_(leaf.requires_grad))] = leaf
            self._alive.append(made)
            return made

        self.observer.reset()
        self.observer.real = True
        try:
            with self.unseen(), torch.random.fork_rng(devices=[]):
                module = Materialiser(self._module, self._tape, torch.device("cpu")).copy_of(path)
                module.__dict__.pop("forward", None)
                out = module.forward(*map_tree(real, args), **map_tree(real, kwargs))
        except _ERRORS as error:
            raise InputError(
                f"module {path!r} of {type(self._module).__name__} does not run on the data set's batch: "
                f"{place_of(error)} (and not without memory: {place_of(reason)}); give it what it expects"
            ) from error
        finally:
            self.observer.real = False
        self.recording.run_for_real[path] = place_of(reason)
        with self.unseen():
            return map_tree(lambda leaf: back.get(id(leaf), stand_in(leaf)), out)

    def check_state(self) -> None:
        """Refuse to look into modules that keep a tensor from one call for the next."""
        for path in self._followed:
            name = self._snapshot.changed(path)
            if name is not None:
                raise CannotFollow(path, f"its forward keeps a tensor in self.{name}")


@dataclass(frozen=True, slots=True)
class _Hooks:
    """The hooks of one submodule."""

    recorder: _Recorder
    path: str

    def __deepcopy__(self, memo: Any) -> _Hooks:
        return self

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.recorder.enter(self.path)

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.recorder.leave()

    def enter_leaf(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.recorder.enter_leaf(self.path, module)

    def leave_leaf(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        return self.recorder.leave_leaf(self.path, args, kwargs, out)


@dataclass(frozen=True, slots=True)
class _Guarded:
    """The forward of a leaf, with the way out when it refuses ``meta`` tensors."""

    recorder: _Recorder
    path: str
    forward: Callable[..., Any]

    def __deepcopy__(self, memo: Any) -> _Guarded:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.forward(*args, **kwargs)
        except _ERRORS as error:
            return self.recorder.run_for_real(self.path, args, kwargs, error)


def _autocast() -> tuple[bool, bool]:
    return torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def _same_window(a: Tensor, b: Tensor) -> bool:
    same = a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    return same and a.storage_offset() == b.storage_offset()
