"""From the names that a user's own configuration gives to callables."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from pdmpi.errors import InputError, nearest

__all__ = ["load_factory"]


def load_factory(name: str) -> Callable[..., Any]:
    """Import what ``"module:callable"`` names.

    Raises
    ------
    InputError
        When the module cannot be imported or has no such callable.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(
            f"factory = {name!r}: cannot import {module_name!r} ({error}); "
            "install it, or put its folder on PYTHONPATH"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        known = [n for n in vars(module) if not n.startswith("_") and callable(getattr(module, n))]
        raise InputError(
            f"factory = {name!r}: {module_name!r} has no callable {attribute!r}{nearest(attribute, known)}"
        )
    return found  # type: ignore[no-any-return]
