"""Turn one section of plain values into its dataclass, or say what is wrong with it; the only user of pydantic."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from cflat._errors import ConfigError
from cflat._registry import suggest
from cflat.config.ranges import check_range

__all__ = ["parse_section", "quote", "require_mapping"]

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80


def quote(value: object) -> str:
    """Return a short representation of any value."""
    return _repr.repr(value)


def require_mapping(values: object, path: str) -> Mapping[str, Any]:
    """Return ``values`` if it is a section: keys that are text.

    Raises:
        ConfigError: If it is something else.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} must hold keys and values, got {quote(values)}.")
    for key in values:
        if not isinstance(key, str):
            raise ConfigError(f"{path} must have keys that are text, got {quote(key)}.")
    return values


def parse_section(cls: type[Any], values: object, path: str) -> Any:
    """Return the dataclass ``cls`` with these values; what is not given keeps its default.

    Args:
        cls: A dataclass whose fields all have defaults.
        values: What was read from a file or typed.
        path: Name of the section in messages.

    Raises:
        ConfigError: If a key is unknown, a value has the wrong type, or a number is out of range.
    """
    section = require_mapping(values, path)
    hints = _hints(cls)  # type: ignore[arg-type]  # mypy doubts that classes hash
    for key in section:
        if key not in hints:
            nearest = suggest(key, list(hints))
            raise ConfigError(f"Unknown key {quote(f'{path}.{key}')}.{nearest} Known: {', '.join(hints) or 'none'}.")
    typed = {key: _as_typed(value, hints[key], f"{path}.{key}") for key, value in section.items()}
    try:
        parsed = _adapter(cls).validate_python(typed)  # type: ignore[arg-type]
    except ValidationError as error:
        raise ConfigError(_explain(error, path)) from None
    for field in fields(parsed):
        check_range(f"{path}.{field.name}", getattr(parsed, field.name))
    return parsed


@cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls)


@cache
def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _as_typed(value: Any, hint: Any, path: str) -> Any:
    """Settle what YAML and pydantic see differently: numbers where text is meant, truth values where numbers are."""
    kinds = _kinds(hint)
    if isinstance(value, Mapping):
        nested = [kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)]
        return parse_section(nested[0], value, path) if nested else value
    if isinstance(value, bool):
        if bool not in kinds and not kinds.isdisjoint({int, float}):
            raise ConfigError(f"{path} must be a number, got {value!r}.")
    elif isinstance(value, int | float):
        if str in kinds and kinds.isdisjoint({int, float}):
            return str(value)
        if kinds <= {bool, type(None)}:
            raise ConfigError(f"{path} must be true or false, got {quote(value)}.")
    return value


def _kinds(hint: Any) -> set[Any]:
    """Return the plain types that a hint accepts."""
    if get_origin(hint) in (Union, UnionType):
        return set().union(*(_kinds(member) for member in get_args(hint)))
    if get_origin(hint) is Literal:
        return {type(member) for member in get_args(hint)}
    return {get_origin(hint) or hint}


def _explain(error: ValidationError, path: str) -> str:
    """Word the first of pydantic's complaints as we do: path, rule, value."""
    first = error.errors(include_url=False)[0]
    where = ".".join([path, *(str(part) for part in first["loc"][:1])])
    if first["type"] == "value_error":  # a check in the dataclass itself; its message starts with the field's name
        return f"{path}.{first['ctx']['error']}"
    if first["type"] in ("missing", "too_short", "too_long"):
        return f"{where} must have another number of members, got {quote(first['input'])}."
    rule = first["msg"].removeprefix("Input should be ").rstrip(".")
    return f"{where} must be {rule}, got {quote(first['input'])}."
