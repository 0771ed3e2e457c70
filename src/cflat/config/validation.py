"""Turn plain values into settings; errors are worded as everywhere else: path, rule, value."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from cflat._errors import ConfigError
from cflat._registry import suggest

WORDS = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
    "a valid boolean": "true or false",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid tuple": "a list",
}
"""Pydantic's rules in our words."""

# Building an adapter is slow, and a sweep parses the same section many times.
_adapter = cache(TypeAdapter)
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80


def quote(value: object) -> str:
    """Return a short representation of any value."""
    return _repr.repr(value)


def require_mapping(values: object, path: str) -> Mapping[str, Any]:
    """Return ``values`` if it is a section: keys that are text."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} must hold keys and values, got {quote(values)}.")
    for key in values:
        if not isinstance(key, str):
            raise ConfigError(f"{path} must have keys that are text, got {quote(key)}.")
    return values


def parse_section(cls: type[Any], values: object, path: str) -> Any:
    """Return the settings ``cls`` with these values; what is not given keeps its default.

    ``path`` is the name of the section in messages, empty for the whole configuration.
    """
    section = require_mapping(values, path or "The configuration")
    prefix = f"{path}." if path else ""
    hints = _hints(cls)
    for key in section:
        if key not in hints:
            known = f"{suggest(key, list(hints))} Known: {', '.join(hints)}."
            raise ConfigError(f"Unknown key {quote(prefix + key)}.{known if hints else ' It has no settings at all.'}")
    try:
        read = {key: _nested(value, hints[key], prefix + key) for key, value in section.items()}
        return _adapter(cls).validate_python(read)  # type: ignore[arg-type]
    except ValidationError as error:
        raise ConfigError(_explain(error, prefix)) from None


def _hints(cls: type[Any]) -> dict[str, Any]:
    """Return the types of the fields; a plain dataclass, of a plug-in, is no pydantic one."""
    fields = getattr(cls, "__pydantic_fields__", None)
    return get_type_hints(cls) if fields is None else {name: field.annotation for name, field in fields.items()}


def _nested(value: Any, hint: Any, path: str) -> Any:
    """Read a mapping as the settings that a key accepts, or a list of them."""
    # Pydantic could do it, but would not suggest a name for an unknown key.
    kinds = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)]
    if kinds and isinstance(value, Mapping):
        return parse_section(kinds[0], value, path)
    if kinds and isinstance(value, list):
        return [parse_section(kinds[0], member, f"{path}[{index}]") for index, member in enumerate(value)]
    return value


def _explain(error: ValidationError, prefix: str) -> str:
    """Return the first of pydantic's errors in our words."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":  # a check in the settings themselves; its message starts with a field's name
        return f"{prefix}{first['ctx']['error']}"
    if first["type"] == "missing":
        key, *inside = first["loc"]
        lack = f"must have more values, got {quote(first['input'])}" if inside else "is missing"
        return f"{prefix}{key} {lack}."
    rule = re.split(", (?:got|unable) ", first["msg"].removeprefix("Input should be "))[0].rstrip(".")
    # In this order: "greater than" is part of the first.
    for theirs, ours in WORDS.items():
        rule = rule.replace(theirs, ours)
    return f"{prefix}{first['loc'][0]} must be {rule}, got {quote(first['input'])}."
