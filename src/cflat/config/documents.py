"""Configuration as text: YAML and JSON files, ``key=value`` overrides, and layers that are laid over each other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from cflat._errors import ConfigError
from cflat._files import read_text
from cflat.config.yaml_text import load_yaml

Layer: TypeAlias = "dict[str, Any]"
"""A configuration, or part of one: values by section and key, as they were typed."""

CHOICES = ("method", "optimizer", "base", "backbone", "data")
"""Sections with a name; ``method=ease`` is short for ``method.name=ease``."""

MAX_BYTES = 1 << 20
"""Of a file; configurations, sweeps and recipes have some thousand."""


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

    A section that chooses another method or optimizer drops the settings of the one below: they are not its own.
    """
    result: Layer = {}
    for layer in layers:
        for key, value in layer.items():
            if key in CHOICES and isinstance(value, str):
                value = {"name": value}
            below = result.get(key)
            if isinstance(value, Mapping) and isinstance(below, Mapping) and not _chooses_anew(key, below, value):
                result[key] = _overlay(below, value)
            else:
                result[key] = dict(value) if isinstance(value, Mapping) else value
    return result


def _overlay(below: Mapping[Any, Any], above: Mapping[Any, Any]) -> Layer:
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = {**result[key], **value} if both else value
    return result


def _chooses_anew(section: Any, below: Mapping[Any, Any], above: Mapping[Any, Any]) -> bool:
    if section not in ("method", "optimizer") or "name" not in above or "name" not in below:
        return False
    first, second = (str(layer["name"]).replace("-", "_").lower() for layer in (below, above))
    return first != second


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
