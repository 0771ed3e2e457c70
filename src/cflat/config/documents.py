"""Configuration as text: YAML and JSON files, ``key=value`` overrides, and layers that are laid over each other."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import yaml
from yaml.nodes import Node, ScalarNode

from cflat._errors import ConfigError
from cflat._files import read_text

Layer: TypeAlias = "dict[str, Any]"
"""A configuration, or part of one: values by section and key, as they were typed."""

CHOICES = ("method", "optimizer", "base", "backbone", "data")
"""Sections with a name; ``method=ease`` is short for ``method.name=ease``."""

MAX_BYTES = 1 << 20
"""Of a file; configurations, sweeps and recipes have some thousand."""
MAX_VALUES = 50_000
"""Keys and values of a document, aliases counted as often as they are used."""
MAX_DIGITS = 1000
"""Of a whole number."""

_TAG = "tag:yaml.org,2002:"
_SCALARS: tuple[tuple[str, str, Sequence[str]], ...] = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
)
"""Tag, pattern of the whole plain scalar, and the characters that it can start with (none, if it can be empty)."""


def read_document(path: str | Path) -> Layer:
    """Read a YAML or JSON file."""
    path = Path(path)
    try:
        text = read_text(path, MAX_BYTES)
        document = json.loads(text) if path.suffix.lower() == ".json" else load_yaml(text)
    except OSError as error:
        raise ConfigError(f"The configuration {str(path)!r} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"The configuration {str(path)!r} is not valid YAML or JSON: {_one_line(error)}.") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"The configuration {str(path)!r} must hold sections such as 'train:', got {document!r:.80}.")
    return document


def parse_overrides(arguments: Sequence[str]) -> Layer:
    """Turn ``train.epochs=5`` and the like into a layer; later ones win.

    >>> parse_overrides(["optimizer.rho=1e-2", "method=ease", "seed=3"])
    {'optimizer': {'rho': 0.01}, 'method': {'name': 'ease'}, 'seed': 3}
    """
    layer: Layer = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        key = key.strip()
        # An empty part, as in .epochs=5 or train..epochs=5, is no key.
        if not equals or not all(key.split(".")):
            raise ConfigError(f"Expected key=value, for example train.epochs=5, got {argument!r}.")
        try:
            value = load_yaml(text)
        except (ValueError, RecursionError, yaml.YAMLError) as error:
            raise ConfigError(f"The value of {key!r} is not valid YAML: {_one_line(error)}.") from error
        layer = merge(layer, nested(key, value))
    return layer


def nested(key: str, value: Any) -> Layer:
    """Return the layer that sets one dotted key.

    >>> nested("optimizer.rho", 0.1)
    {'optimizer': {'rho': 0.1}}
    """
    *sections, last = key.split(".")
    layer: Layer = {last: value}
    for section in reversed(sections):
        layer = {section: layer}
    return layer


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the members of nested mappings under dotted keys.

    >>> flatten({"train": {"epochs": 5}, "seed": 0})
    {'train.epochs': 5, 'seed': 0}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def merge(*layers: Mapping[Any, Any]) -> Layer:
    """Lay configurations over each other; later ones win.

    A section that chooses another method or optimizer drops the settings of the one below: they are not its own. With
    another base optimizer, what all of them share stays.
    """
    result: Layer = {}
    for layer in layers:
        for key, value in layer.items():
            if key in CHOICES and isinstance(value, str):
                value = {"name": value}
            below = result.get(key)
            if isinstance(value, Mapping) and isinstance(below, Mapping):
                result[key] = _overlay(_kept(key, below, value), value)
            else:
                result[key] = dict(value) if isinstance(value, Mapping) else value
    return result


def _overlay(below: Mapping[Any, Any], above: Mapping[Any, Any]) -> Layer:
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = {**result[key], **value} if both else value
    return result


def _kept(section: Any, below: Mapping[Any, Any], above: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return what remains of a section when another one is laid over it."""
    if section not in ("method", "optimizer", "base") or "name" not in above or "name" not in below:
        return below
    first, second = (str(layer["name"]).replace("-", "_").lower() for layer in (below, above))
    if first == second:
        return below
    if section != "base":
        return {}
    from cflat.train.settings import SHARED_BY_BASES  # needs torch, which most commands do not

    return {key: value for key, value in below.items() if key in SHARED_BY_BASES}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# YAML 1.2 (core schema) in bounded time and memory. PyYAML reads YAML 1.1, in which ``1:2:3`` is 3723, ``on`` is true,
# ``010`` is 8 and ``1e-3`` is text. Documents are trees: an alias stands for a copy. Aliases of aliases can mean far
# more than they hold, so values are counted before they are built.


def load_yaml(text: str) -> Any:
    """Return the value of a document.

    >>> load_yaml("[1e-3, 1:2:3, off, 010, ~]")
    [0.001, '1:2:3', 'off', 10, None]

    Raises:
        yaml.YAMLError: If it is no YAML, contains itself, or holds more than `MAX_VALUES` values.
        ValueError: If a tag and its value disagree.
        RecursionError: If it is nested too deeply.
    """
    return yaml.load(text, _Loader)


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Return the text of a mapping, in the order of its keys; `load_yaml` reads the same values back."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True)


def _int(loader: yaml.SafeLoader, node: ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of more than {MAX_DIGITS:,} digits")  # Python prints at most 4300
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text if base == 10 else text[2:], base)


def _float(loader: yaml.SafeLoader, node: ScalarNode) -> float:
    return float(str(loader.construct_scalar(node)).lower().replace(".inf", "inf").replace(".nan", "nan"))


def _bool(loader: yaml.SafeLoader, node: ScalarNode) -> bool:
    return ["false", "true"].index(str(loader.construct_scalar(node)).lower()) == 1  # a ValueError for others


class _Loader(yaml.SafeLoader):
    """Plain values only: no dates, sets or bytes."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]
    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        None: yaml.SafeLoader.construct_undefined,
        f"{_TAG}null": yaml.SafeLoader.construct_yaml_null,
        f"{_TAG}bool": _bool,
        f"{_TAG}int": _int,
        f"{_TAG}float": _float,
        f"{_TAG}str": yaml.SafeLoader.construct_yaml_str,
        f"{_TAG}seq": yaml.SafeLoader.construct_yaml_seq,
        f"{_TAG}map": yaml.SafeLoader.construct_yaml_map,
    }

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.num_values = 0
        self.sizes: dict[int, int] = {}
        """Values that each finished node stands for."""

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """Count the values as they are read; an alias counts as often as it is used."""
        before, is_alias = self.num_values, self.check_event(yaml.AliasEvent)
        self.num_values += 1
        node = super().compose_node(parent, index)
        # Sizes are entered when a node is complete: one without a size is still open around this alias.
        if is_alias and id(node) not in self.sizes:
            raise yaml.YAMLError("it contains itself: an alias stands inside of what it names")
        if is_alias:
            self.num_values += self.sizes[id(node)] - 1
        if self.num_values > MAX_VALUES:
            raise yaml.YAMLError(
                f"it holds more than {MAX_VALUES:,} values, those behind aliases counted as often as used"
            )
        self.sizes[id(node)] = self.num_values - before
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would take for something else than text, and never writes aliases."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern, _starts in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"{_TAG}{_name}", re.compile(f"^(?:{_pattern})$"), _starts)
