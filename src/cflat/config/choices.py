"""The sections that are a choice by name with settings of its own: method, optimizer and base optimizer.

The keywords of classes become pydantic models: name, type, range and meaning are written once, where the class is.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from textwrap import dedent
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model
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

_STRICT: dict[Any, Any] = {float: Number, int: Whole, bool: Flag}
"""Plain types of other people's annotations as ours, which do not take true for 1."""


@dataclass(frozen=True)
class Choice:
    """A method or an optimizer by name, with its settings."""

    name: str
    settings: Any
    """The choice's own fields, frozen; plain values if it belongs to a plug-in that is not loaded."""

    def keywords(self) -> dict[str, Any]:
        """Return the settings as keywords of the class."""
        own = self.settings if isinstance(self.settings, Mapping) else vars(self.settings)
        return {key: value for key, value in own.items() if key not in OF_TRAINER}

    def of_trainer(self) -> dict[str, Any]:
        """Return the settings that the trainer carries out."""
        return {name: getattr(self.settings, name) for name in OF_TRAINER if hasattr(self.settings, name)}


def parse_method(values: object, *, is_past: bool = False) -> Choice:
    """Return the chosen method; with ``is_past``, an unknown one keeps its recorded settings unchecked."""
    return _parse("method", get_method_spec, lambda name: get_method_spec(name).config, values, is_past)


def parse_optimizer(values: object, *, is_past: bool = False) -> Choice:
    """Return the chosen optimizer, as `parse_method` does."""
    return _parse("optimizer", get_optimizer_spec, optimizer_config, values, is_past)


def _parse(
    path: str, get_spec: Callable[[str], Any], model: Callable[[str], type[Any]], values: object, is_past: bool
) -> Choice:
    own = dict(require_mapping(values, path))
    name = own.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{path}.name must be given as text, got {quote(name)}. Run: cflat list {path}s")
    try:
        # In its canonical spelling: configurations of c-flat and c_flat must be equal.
        name = get_spec(name).name
    except UnknownName:
        if is_past:
            return Choice(name, own)
        raise
    return Choice(name, parse_section(model(name), own, path))


def parse_base(values: object) -> BaseSettings:
    """Return the settings of the base optimizer, its own keywords among them."""
    section = require_mapping(values, "base")
    name = section.get("name", "sgd")
    name = name.lower() if isinstance(name, str) else name
    own = base_keywords(name) if isinstance(name, str) else {}
    for key in section:
        if key not in SHARED_BY_BASES and key not in own:
            # Both lists: the reader does not know which keys are torch's.
            near = suggest(key, [*SHARED_BY_BASES, *own])
            known = f"{', '.join(SHARED_BY_BASES)}; of {name}: {', '.join(own)}"
            raise ConfigError(f"Unknown key {quote(f'base.{key}')}.{near} Known: {known}.")
    given = {key: value for key, value in section.items() if key in own}
    shared = {key: value for key, value in section.items() if key in SHARED_BY_BASES}
    keywords = dict(parse_section(base_config(name), given, "base")) if own else {}
    settings: BaseSettings = parse_section(BaseSettings, {**shared, "name": name, "keywords": keywords}, "base")
    return settings


@cache
def optimizer_config(name: str) -> type[BaseModel]:
    """Return a model of an optimizer's keywords, and of what the trainer does for it."""
    own = _keywords(name)
    # An optimizer of a plug-in may have a keyword of that name, which is then its own.
    extra = {key: OF_TRAINER[key] for key in _settings_of(name) if key not in own}
    return _model_of(get_optimizer_spec(name).cls, own, extra)


@cache
def base_config(name: str) -> type[BaseModel]:
    """Return a model of a base optimizer's own keywords."""
    return _model_of(base_class(name), base_keywords(name), {})


def _model_of(cls: Any, keywords: Mapping[str, Any], extra: Mapping[str, Any]) -> type[BaseModel]:
    """Return a model of keywords of a class, from its annotations and its docstring."""
    try:
        hints = get_type_hints(cls.__init__, include_extras=True)
    except NameError as error:
        raise ConfigError(f"{cls.__name__} cannot be configured: a type hint is unknown: {error}.") from None
    meanings, fields = _argument_docstrings(inspect.getdoc(cls) or ""), dict(extra)
    for key, default in keywords.items():
        if key not in hints or default is inspect.Parameter.empty:
            lack = "type hint" if key not in hints else "default"
            raise ConfigError(
                f"{cls.__name__} cannot be configured: its keyword {key!r} has no {lack}; "
                f"write it as for example {key}: float = 0.1."
            )
        # Torch accepts a momentum of 2, which cannot be meant.
        hint = Fraction if key == "momentum" and hints[key] is float else _for_files(hints[key])
        # Torch writes 0 where it means 0.0; a configuration must be the same text before and after it was read.
        default = float(default) if hints[key] is float and isinstance(default, int) else default
        fields[key] = (hint, Field(default=default, description=meanings.get(key)))
    ordered = {key: fields[key] for key in (*keywords, *extra)}
    config = ConfigDict(**SETTINGS, frozen=True)
    return create_model(f"{cls.__name__}Settings", __config__=config, __doc__=cls.__doc__, **ordered)


def _for_files(hint: Any) -> Any:
    """Return a type without functions and tensors, which a file cannot hold, and with strict numbers."""
    if get_origin(hint) in (Union, UnionType):
        kept = [one for one in get_args(hint) if one is not Tensor and get_origin(one) is not Callable]
        return Union[tuple(_for_files(member) for member in kept)]  # noqa: UP007  built at run time
    if get_origin(hint) is tuple:
        return tuple[tuple(_for_files(member) for member in get_args(hint))]  # type: ignore[misc]
    return _STRICT.get(hint, hint)


def _argument_docstrings(text: str) -> dict[str, str]:
    """Return the entries of the ``Args:`` section of a docstring, as Google and torch write them."""
    found: dict[str, str] = {}
    name = ""
    section = takewhile(lambda line: line.startswith("    "), text.partition("Args:\n")[2].splitlines())
    for line in dedent("\n".join(section)).splitlines():
        if line.startswith(" ") and name:
            found[name] += " " + line.strip()
        elif entry := re.match(r"(\w+)(?: \(.*?\))? ?:\s*(.*)", line.strip()):  # torch writes the type after the name
            name = entry[1]
            found[name] = entry[2]
    return {key: re.sub(r"\s*\(default: .*?\)", "", meaning) for key, meaning in found.items()}  # need not be ours


def own_settings(shared: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the section of one optimizer among several that share settings: those that it has.

    >>> own_settings({"rho": 0.1}, "sam"), own_settings({"rho": 0.1}, "none")
    ({'name': 'sam', 'rho': 0.1}, {'name': 'none'})
    """
    known = _settings_of(name)
    return {"name": name, **{key: value for key, value in shared.items() if key in known}}


def require_shared_settings(keys: Iterable[str], names: Iterable[str]) -> None:
    """Reject a setting that none of several optimizers has: it would be ignored everywhere."""
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
