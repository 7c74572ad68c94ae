"""Following and training a model without loading torch's compiler, most of a rank's start otherwise.

Optimizers, and operators on ``meta`` tensors, import ``torch._dynamo`` to exempt themselves
from it; those operators also import ``torch.fx.experimental.symbolic_shapes`` and SymPy, to
compare sizes and types that may be symbols: some 800 modules.  Small modules stand in for
these where nothing is compiled and nothing is a symbol.  Whoever asks one of them for
anything else gets all the real ones.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

__all__ = ["without_compiler"]

_COMPILER, _SHAPES, _SYMBOLS = "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "sympy"


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let operators on ``meta`` tensors do without torch's compiler where it is not loaded yet."""
    stand_ins = (
        _StandIn(_COMPILER, disable=_disable, graph_break=lambda *_, **__: None),
        _StandIn(_SHAPES, **_comparisons()),
        _StandIn(_SYMBOLS, Basic=type("Basic", (), {})),
    )
    ours = [sys.modules.setdefault(module.__name__, module) is module for module in stand_ins]
    try:
        yield
    finally:
        if any(ours):  # else it is up to whoever put them there
            _retire()


class _StandIn(ModuleType):
    """A module with a few members; it passes everything on to the real one when more is wanted of it."""

    def __init__(self, name: str, **members: Any) -> None:
        super().__init__(name)
        self.members = members

    def __getattr__(self, name: str) -> Any:
        if name in self.members:
            return self.members[name]
        imports_from_package = name == "__path__" and self.__name__ != _SHAPES
        if name.startswith("__") and not imports_from_package:  # asked by every "from ... import"
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


def _disable(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Stand in for `torch._dynamo.disable`: the function itself until the compiler is there."""
    exempted: list[Callable[..., Any]] = []

    def exempt(*operands: Any, **named: Any) -> Any:
        if isinstance(sys.modules.get(_COMPILER), _StandIn):
            return function(*operands, **named)
        if not exempted:
            exempted.append(_real(_COMPILER).disable(function, *args, **kwargs))
        return exempted[0](*operands, **named)

    return exempt


def _comparisons() -> dict[str, Callable[..., Any]]:
    """Return what is asked of sizes, by its name in torch: as it is for numbers, torch's own for symbols."""
    plain: dict[str, Callable[..., Any]] = {
        "sym_and": lambda *conditions: all(conditions),
        "sym_or": lambda *conditions: any(conditions),
        "sym_eq": lambda a, b: a == b,
        "is_nested_int": lambda size: False,
        "has_guarding_hint": lambda size: True,
        "guarding_hint_or_throw": lambda size: size,
    }
    plain |= dict.fromkeys(
        ("guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true", "expect_true"),
        bool,
    )

    def of(name: str) -> Callable[..., Any]:
        def compare(*operands: Any) -> Any:
            known = all(map(_is_known, operands))
            return plain[name](*operands) if known else getattr(_real(_SHAPES), name)(*operands)

        return compare

    return {name: of(name) for name in plain}


def _is_known(operand: Any) -> bool:
    return type(operand) in (bool, int) or (
        isinstance(operand, (tuple, list)) and all(map(_is_known, operand))
    )


def _real(name: str) -> ModuleType:
    _retire()
    return importlib.import_module(name)


def _retire() -> None:
    for name in (_COMPILER, _SHAPES, _SYMBOLS):
        module = sys.modules.get(name)
        if isinstance(module, _StandIn):
            module.members.clear()  # whoever still holds it gets the real members
            sys.modules.pop(name, None)
