"""The two sections that are a choice by name with settings of its own: the method and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from inspect import Parameter
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from cflat._errors import ConfigError
from cflat._registry import suggest
from cflat._settings import settings_class
from cflat.config.validation import parse_section, quote, require_mapping
from cflat.methods import get_method_spec
from cflat.optim import get_optimizer_spec, optimizer_settings

NOT_SETTINGS = ("options",)
"""Keywords of optimizers that a run sets itself."""


@dataclass(frozen=True)
class Choice:
    """A method or an optimizer by name, with its settings."""

    name: str
    settings: Any
    """A frozen dataclass of the choice's own fields."""

    def keywords(self) -> dict[str, Any]:
        """Return the settings as keywords."""
        return {f.name: getattr(self.settings, f.name) for f in fields(self.settings)}


def parse_method(values: object) -> Choice:
    """Return the chosen method."""
    name, own = _split(values, "method")
    spec = get_method_spec(name)
    return Choice(spec.name, parse_section(spec.config, own, "method"))


def parse_optimizer(values: object) -> Choice:
    """Return the chosen optimizer; its own checks decide about ranges."""
    name, own = _split(values, "optimizer")
    spec = get_optimizer_spec(name)
    choice = Choice(spec.name, parse_section(optimizer_config(spec.name), own, "optimizer"))
    try:
        spec.cls(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9), **choice.keywords())
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"optimizer.{error}") from None
    return choice


@cache
def optimizer_config(name: str) -> type[Any]:
    """Return a frozen dataclass of an optimizer's keywords, without those that only code can give."""
    cls: Any = get_optimizer_spec(name).cls
    defaults = {key: value for key, value in optimizer_settings(name).items() if key not in NOT_SETTINGS}
    hints = _keyword_hints(cls, defaults)
    types = {key: _without_callables(hints[key]) for key in defaults}
    made = type(f"{cls.__name__}Settings", (), {**defaults, "__annotations__": types, "__doc__": cls.__doc__})
    return settings_class(made)


def _keyword_hints(cls: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the types of an optimizer's keywords; the command line can read a value only where there is one."""
    try:
        hints = get_type_hints(cls.__init__, include_extras=True)
    except NameError as error:
        raise ConfigError(f"{cls.__name__} cannot be configured: a type hint is unknown: {error}.") from None
    for key, default in defaults.items():
        if key not in hints or default is Parameter.empty:
            lack = "type hint" if key not in hints else "default"
            raise ConfigError(
                f"{cls.__name__} cannot be configured: its keyword {key!r} has no {lack}; "
                f"write it as for example {key}: float = 0.1."
            )
    return hints


def own_settings(shared: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the section of one optimizer among several that share settings: those that it has.

    >>> own_settings({"rho": 0.1}, "sam"), own_settings({"rho": 0.1}, "none")
    ({'name': 'sam', 'rho': 0.1}, {'name': 'none'})
    """
    known = _settings_of(name)
    return {"name": name, **{key: value for key, value in shared.items() if key in known}}


def require_shared_settings(keys: Iterable[str], names: Iterable[str]) -> None:
    """Refuse a setting that none of several optimizers has: it would be passed over everywhere."""
    known = list(dict.fromkeys(key for name in names for key in ("name", *_settings_of(name))))
    for key in keys:
        if key not in known:
            raise ConfigError(
                f"Unknown key {quote(f'optimizer.{key}')}.{suggest(str(key), known)} "
                f"The chosen optimizers know: {', '.join(known)}."
            )


def _settings_of(name: str) -> list[str]:
    return [key for key in optimizer_settings(name) if key not in NOT_SETTINGS]


def _without_callables(hint: Any) -> Any:
    """Drop what a file cannot hold: radii and probabilities that are functions."""
    if get_origin(hint) not in (Union, UnionType):
        return hint
    kept = tuple(member for member in get_args(hint) if get_origin(member) is not Callable)
    return Union[kept]  # noqa: UP007  built at run time


def _split(values: object, path: str) -> tuple[str, dict[str, Any]]:
    section = dict(require_mapping(values, path))
    name = section.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{path}.name must be given as text, got {quote(name)}. Run: cflat list {path}s")
    return name, section
