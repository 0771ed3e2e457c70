"""Every key of a configuration with its type, default and meaning, read from the code that defines it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import dataclasses

from cflat._errors import ConfigError
from cflat._registry import suggest
from cflat.config.choices import base_config, optimizer_config
from cflat.config.run_config import SECTIONS
from cflat.methods import get_method_spec, list_methods
from cflat.optim import list_optimizers
from cflat.train.settings import list_bases


@dataclass(frozen=True)
class Key:
    """One key."""

    path: str
    type: str
    default: Any
    meaning: str


KEYWORDS = Key(
    "base.KEYWORD",
    "any",
    {},
    "Further keywords of that optimizer under their own names, with its defaults, such as base.momentum (0.9 for sgd) "
    "and base.nesterov of sgd, base.nu of qhm, base.betas of adamw; see ``cflat list keys qhm``.",
)
"""Stands for `BaseSettings.keywords`, which a configuration holds beside the other keys."""


def describe_keys(of: str | None = None) -> list[Key]:
    """Return the keys that all runs share, or those of one method or optimizer."""
    if of is None:
        keys = [key for section, cls in SECTIONS.items() for key in keys_of_settings(section, cls)]
        return [key if key.path != "base.keywords" else KEYWORDS for key in keys]
    methods, optimizers, bases = list_methods(), list_optimizers(), list_bases()
    name = of.replace("-", "_").lower()
    if name in methods:
        return list(keys_of_settings("method", get_method_spec(name).config))
    if name in optimizers:
        return list(keys_of_settings("optimizer", optimizer_config(name)))
    if name in bases:
        return list(keys_of_settings("base", base_config(name)))
    raise ConfigError(f"No method or optimizer is called {of!r}.{suggest(name, methods + optimizers + bases)}")


def markdown_keys() -> str:
    """Return the keys that all runs share as a Markdown table; ``docs/configuration.md`` holds it."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key in describe_keys():
        default = key.default if isinstance(key.default, str) else json.dumps(key.default)
        lines.append(f"| `{key.path}` | `{default}` | {key.meaning.replace('``', '`').replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def keys_of_settings(section: str, cls: type[Any]) -> Iterator[Key]:
    """Yield the keys of a settings class under the name of its section."""
    if not hasattr(cls, "__pydantic_fields__"):  # a plain dataclass, of a plug-in
        # Pydantic subclasses a plain dataclass, and the subclass must be as frozen as its base.
        cls = dataclasses.dataclass(cls, frozen=cls.__dataclass_params__.frozen)
    # A field that a subclass overrides without a docstring keeps the meaning of its base.
    own = [base.__dict__.get("__pydantic_fields__", {}) for base in reversed(cls.__mro__)]
    meanings = {name: info.description for fields in own for name, info in fields.items() if info.description}
    for name, info in cls.__pydantic_fields__.items():
        meaning = " ".join(meanings.get(name, "").split())
        default = list(info.default) if isinstance(info.default, tuple) else info.default
        yield Key(f"{section}.{name}", _type_name(info.annotation), default, meaning)


def _type_name(hint: Any) -> str:
    """Return a type in plain words.

    >>> _type_name(tuple[int, ...] | None), _type_name(Literal["a", "b"])
    ('list of int | null', 'a | b')
    """
    kind, members = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return _type_name(members[0])
    if kind in (Union, UnionType):
        return " | ".join(_type_name(member) for member in members)
    if kind is Literal:
        return " | ".join(str(member) for member in members)
    if kind is tuple:
        return f"list of {_type_name(members[0])}"
    return "null" if hint is type(None) else str(getattr(hint, "__name__", hint))
