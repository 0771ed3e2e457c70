"""The sections that are a choice by name with settings of its own: method, optimizer and base optimizer.

The keywords of classes become pydantic models, so that a name, a type and a range are written once, where the class is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import Parameter
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model
from torch import Tensor

from cflat._errors import ConfigError, UnknownName
from cflat._ranges import Fraction, Number, Whole
from cflat._registry import suggest
from cflat._settings import SETTINGS, Flag
from cflat.config.validation import parse_section, quote, require_mapping
from cflat.methods import get_method_spec
from cflat.optim import get_optimizer_spec, optimizer_settings
from cflat.train.perturb import FirstTask, Perturbed
from cflat.train.settings import SHARED_BY_BASES, BaseSettings, base_class, base_keywords

MODEL = ConfigDict(**SETTINGS, frozen=True)
NOT_SETTINGS = ("options",)
"""Keywords of optimizers that a run sets itself."""

OF_TRAINER: dict[str, tuple[Any, Any]] = {
    "perturb": (
        Perturbed,
        Field(
            default="all",
            description="What is perturbed: all that is trained, norms (normalization layers, SAM-ON), adapters (and "
            "prompts), body (all but the head). The rest is trained without.",
        ),
    ),
    "first_task": (
        FirstTask,
        Field(
            default="same",
            description="same: the first task is trained as all others; plain: with the base optimizer alone, as the "
            "official C-Flat code does.",
        ),
    ),
}
"""Settings of every optimizer with a radius that the trainer carries out: types, defaults and meanings."""


_NUMBERS = {float: Number, int: Whole, bool: Flag}
_RANGES: dict[str, Any] = {"momentum": Fraction}
"""Where torch accepts what cannot be meant."""


@dataclass(frozen=True)
class Choice:
    """A method or an optimizer by name, with its settings."""

    name: str
    settings: Any
    """The choice's own fields, frozen; plain values, if a plug-in has it that is not here."""

    def keywords(self) -> dict[str, Any]:
        """Return the settings as keywords of the class."""
        own = self.settings if isinstance(self.settings, Mapping) else vars(self.settings)
        return {key: value for key, value in own.items() if key not in OF_TRAINER}

    def of_trainer(self) -> dict[str, Any]:
        """Return the settings that are the trainer's."""
        return {name: getattr(self.settings, name) for name in OF_TRAINER if hasattr(self.settings, name)}


def parse_method(values: object, *, is_past: bool = False) -> Choice:
    """Return the chosen method; in what is past, one that is not here has the settings that were written down."""
    name, own = _split(values, "method")
    try:
        spec = get_method_spec(name)
    except UnknownName:
        if not is_past:
            raise
        return Choice(name, own)
    return Choice(spec.name, parse_section(spec.config, own, "method"))


def parse_optimizer(values: object, *, is_past: bool = False) -> Choice:
    """Return the chosen optimizer, as `parse_method` does."""
    name, own = _split(values, "optimizer")
    try:
        spec = get_optimizer_spec(name)
    except UnknownName:
        if not is_past:
            raise
        return Choice(name, own)
    return Choice(spec.name, parse_section(optimizer_config(spec.name), own, "optimizer"))


@cache
def optimizer_config(name: str) -> type[BaseModel]:
    """Return a model of an optimizer's keywords: the annotations of its class are the only place with their ranges."""
    cls = get_optimizer_spec(name).cls
    try:
        hints = get_type_hints(cls.__init__, include_extras=True)
    except NameError as error:
        raise ConfigError(f"{cls.__name__} cannot be configured: a type hint is unknown: {error}.") from None
    fields: dict[str, Any] = {}
    for key, default in _keywords(name).items():
        if key not in hints or default is Parameter.empty:
            lack = "type hint" if key not in hints else "default"
            raise ConfigError(
                f"{cls.__name__} cannot be configured: its keyword {key!r} has no {lack}; "
                f"write it as for example {key}: float = 0.1."
            )
        fields[key] = (_without_callables(hints[key]), default)
    # An optimizer of a plug-in may have a keyword of that name, which is then its own.
    fields |= {key: OF_TRAINER[key] for key in _settings_of(name) if key not in fields}
    return create_model(f"{cls.__name__}Settings", __config__=MODEL, __doc__=cls.__doc__, **fields)


def parse_base(values: object) -> BaseSettings:
    """Return the settings of the base optimizer, its own keywords among them."""
    section = require_mapping(values, "base")
    name = section.get("name", "sgd")
    name = name.lower() if isinstance(name, str) else name
    own = base_keywords(name) if isinstance(name, str) else {}
    for key in section:
        if key not in SHARED_BY_BASES and key not in own:
            near = suggest(key, [*SHARED_BY_BASES, *own])
            known = f"{', '.join(SHARED_BY_BASES)}; of {name}: {', '.join(own)}"
            raise ConfigError(f"Unknown key {quote(f'base.{key}')}.{near} Known: {known}.")
    keywords = dict(parse_section(base_config(name), _only(section, own), "base")) if own else {}
    settings: BaseSettings = parse_section(
        BaseSettings, {**_only(section, SHARED_BY_BASES), "name": name, "keywords": keywords}, "base"
    )
    return settings


@cache
def base_config(name: str) -> type[BaseModel]:
    """Return a model of a base optimizer's own keywords."""
    cls: Any = base_class(name)
    hints = get_type_hints(cls.__init__, include_extras=True)
    types = {key: _RANGES.get(key) or _plain(hints[key]) for key in base_keywords(name)}
    # Torch writes 0 where it means 0.0; a configuration must be the same text before and after it was read.
    defaults = {key: TypeAdapter(types[key]).validate_python(value) for key, value in base_keywords(name).items()}
    fields: dict[str, Any] = {key: (types[key], default) for key, default in defaults.items()}
    return create_model(f"{cls.__name__}Settings", __config__=MODEL, **fields)


def own_settings(shared: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the section of one optimizer among several that share settings: those that it has.

    >>> own_settings({"rho": 0.1}, "sam"), own_settings({"rho": 0.1}, "none")
    ({'name': 'sam', 'rho': 0.1}, {'name': 'none'})
    """
    known = _settings_of(name)
    return {"name": name, **{key: value for key, value in shared.items() if key in known}}


def require_shared_settings(keys: Iterable[str], names: Iterable[str]) -> None:
    """Reject a setting that none of several optimizers has: it would be passed over everywhere."""
    known = list(dict.fromkeys(key for name in names for key in ("name", *_settings_of(name))))
    for key in keys:
        if key not in known:
            raise ConfigError(
                f"Unknown key {quote(f'optimizer.{key}')}.{suggest(str(key), known)} "
                f"The chosen optimizers know: {', '.join(known)}."
            )


def _keywords(name: str) -> dict[str, Any]:
    """Return the keywords of an optimizer that a configuration can set, with their defaults."""
    return {key: default for key, default in optimizer_settings(name).items() if key not in NOT_SETTINGS}


def _settings_of(name: str) -> list[str]:
    """Return the keys of an optimizer: its keywords, and what the trainer does for those that have a radius."""
    own = list(_keywords(name))
    return [*own, *(key for key in OF_TRAINER if "rho" in own and key not in own)]


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


def _only(values: Mapping[str, Any], keys: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key in keys}


def _plain(hint: Any) -> Any:
    """Return a type without tensors, which a file cannot hold, and with numbers that are no truth values."""
    if hint in _NUMBERS:
        return _NUMBERS[hint]
    if get_origin(hint) is tuple:
        return tuple[tuple(_plain(member) for member in get_args(hint))]  # type: ignore[misc]
    if get_origin(hint) in (Union, UnionType):
        kept = tuple(_plain(member) for member in get_args(hint) if member is not Tensor)
        return Union[kept]  # noqa: UP007  built at run time
    return hint
