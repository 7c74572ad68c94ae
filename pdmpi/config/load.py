"""Reading a run's configuration: every problem of the file in one error."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pdmpi.config.run import RunConfig
from pdmpi.errors import InputError, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["load_config", "parse_config"]


def load_config(path: Path | str) -> RunConfig:
    """Read and check a configuration file.

    Raises
    ------
    InputError
        The file cannot be read, is no TOML, has unknown keys (the nearest known one is
        named), missing ones, or values out of their range; all of it in one line.
    """
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read configuration {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"configuration {str(path)!r} is no UTF-8 text; is it a TOML file?") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"configuration {str(path)!r} is no valid TOML: {error}") from None
    return parse_config(data, str(path))


def parse_config(data: Mapping[str, Any], source: str = "configuration") -> RunConfig:
    """Check a configuration that has been parsed already; ``source`` names it in errors."""
    problems: list[str] = []
    config = None
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        knobs: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
        for details in error.errors(include_url=False):
            knobs.setdefault(_knob(details["loc"]).place, []).append(details)
        problems += [_explain(found) for found in knobs.values()]
    problems += _contradictions(data)
    if config is None or problems:
        raise InputError(f"{source}: " + "; ".join(problems))
    return config


def _contradictions(data: Mapping[str, Any]) -> Iterator[str]:
    """Find values that are right by themselves and wrong together."""
    train, schedule = (_table(data, name) for name in ("train", "schedule"))
    if train:
        given = [key for key in ("epochs", "steps") if key in train]
        if len(given) != 1:
            both = f"epochs = {train.get('epochs')} and steps = {train.get('steps')}: keep one"
            yield f"[train] {both}" if given else "[train] needs either epochs or steps"
    size, parts = train.get("minibatch_size"), schedule.get("microbatches", 1)
    if _is_count(size) and _is_count(parts) and size % parts:
        yield (
            f"[train] minibatch_size = {size} is not divisible by [schedule] microbatches = {parts}; "
            f"set minibatch_size = {max(1, round(size / parts)) * parts}"
        )


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = data.get(name)
    return value if isinstance(value, Mapping) else {}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _explain(found: list[ErrorDetails]) -> str:
    """Turn pydantic's errors for one knob into what a person needs: its name, value and the remedy."""
    kind, value = found[0]["type"], found[0]["input"]
    knob = _knob(found[0]["loc"])
    name = f"{knob.table} {knob.key}" if knob.table else f"[{knob.key}]"
    fields = knob.owner.model_fields
    if kind == "extra_forbidden":
        noun = "key" if knob.table else "table"
        return f"unknown {noun} {name}{nearest(knob.key, fields)}"
    meaning = (fields[knob.key].description or "").replace("``", "").rstrip(".").partition(";")[0]
    purpose = f" ({meaning})" if meaning else ""
    if kind == "missing":
        return f"{name} is missing{purpose}"
    wanted = " or ".join(dict.fromkeys(_wanted(details) for details in found))
    return f"{name} = {_toml(value)}: must be {wanted}{purpose}"


class _Knob(NamedTuple):
    """A key: its place in the file, the header of its table (nothing for a table), its table's class."""

    place: tuple[int | str, ...]
    table: str
    owner: type[BaseModel]
    key: str


def _knob(where: tuple[int | str, ...]) -> _Knob:
    """Return the innermost key of the file on the way to an error."""
    found = _Knob(where[:1], "", RunConfig, str(where[0]))
    for end, part in enumerate(where[1:], start=1):
        field = found.owner.model_fields.get(found.key)
        inner = _table_class(field.annotation) if field else None
        if isinstance(part, str):
            if inner is None:
                break
            names = ".".join(name for name in where[:end] if isinstance(name, str))
            table = f"[[{names}]]" if isinstance(where[end - 1], int) else f"[{names}]"
            found = _Knob(where[: end + 1], table, inner, part)
    return found


def _table_class(annotation: Any) -> type[BaseModel] | None:
    """Return the class of a table, or of the tables of a list."""
    for found in (annotation, *get_args(annotation)):
        if isinstance(found, type) and issubclass(found, BaseModel):
            return found
    return None


def _wanted(details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "string_pattern_mismatch":
        return 'written "module:callable"'
    if kind == "model_type":
        return "a table"
    if kind == "too_short":
        return f"a list of at least {context['min_length']}"
    if kind == "literal_error":
        return str(context["expected"])
    for start, noun in (("int", "a whole number"), ("float", "a number"), ("string", "a text"),
                        ("dict", "a table"), ("tuple", "a list")):  # fmt: skip
        if kind.startswith(f"{start}_"):
            return noun
    if "ge" in context:
        return f"at least {context['ge']}"
    if "gt" in context:
        return f"more than {context['gt']}"
    return str(details["msg"]).partition("should be ")[2] or str(details["msg"])


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
