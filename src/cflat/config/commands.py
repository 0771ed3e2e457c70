"""The command that repeats a run: what differs from its preset, and nothing else."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from cflat._errors import ConfigError
from cflat.config.documents import Layer, merge, parse_overrides
from cflat.config.presets import PRESETS, default_preset, resolve_config
from cflat.config.run_config import RunConfig

__all__ = ["flatten", "reproduce_command"]

MAX_ROUNDS = 4
"""A key that is added can change what the preset says about others; a few rounds settle it."""


def reproduce_command(config: RunConfig) -> str | None:
    """Return the ``cflat run`` that resolves to this configuration; None if no command line does.

    A configuration without a preset is spelled out against the one that its dataset usually starts from.
    """
    preset = config.preset if config.preset in PRESETS else default_preset(config.data.name)
    named = {
        "--method": config.method.name,
        "--data": config.data.name,
        "--optimizer": config.optimizer.name,
        "--preset": None if preset == default_preset(config.data.name) else preset,
        "--seed": str(config.seed),
    }
    start: Layer = {
        "method": {"name": config.method.name},
        "data": {"name": config.data.name},
        "optimizer": {"name": config.optimizer.name},
        "preset": preset,
        "seed": config.seed,
    }
    overrides = _overrides(start, {**config.to_dict(), "preset": preset})
    if overrides is None:
        return None
    options = [word for option, value in named.items() if value is not None for word in (option, value)]
    return shlex.join(["cflat", "run", *options, *(f"{key}={_text(value)}" for key, value in overrides.items())])


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the members of nested mappings under dotted keys.

    >>> flatten({"train": {"epochs": 5}, "seed": 0})
    {'train.epochs': 5, 'seed': 0}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _overrides(start: Layer, wanted: Layer) -> dict[str, Any] | None:
    """Return the keys to add to ``start`` so that it resolves to ``wanted``."""
    target = flatten(wanted)
    overrides: dict[str, Any] = {}
    for _ in range(MAX_ROUNDS):
        layer = parse_overrides([f"{key}={_text(value)}" for key, value in overrides.items()])
        try:
            found = flatten(resolve_config(merge(start, layer)).to_dict())
        except ConfigError:
            # Weights must be said aloud for some backbones; other errors do not go away with them.
            if "backbone.weights" in overrides:
                return None
            overrides["backbone.weights"] = target["backbone.weights"]
            continue
        missing = {key: value for key, value in target.items() if key not in found or found[key] != value}
        if not missing:
            return overrides
        overrides |= missing
    return None


def _text(value: Any) -> str:
    """Return a value as the command line reads it back."""
    if isinstance(value, str) and _reread(value) == value:
        return value
    return json.dumps(value)


def _reread(text: str) -> Any:
    """Read one YAML value; None if it is none."""
    try:
        return parse_overrides([f"key={text}"])["key"]
    except ConfigError:
        return None
