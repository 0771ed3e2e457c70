"""Commands that repeat a run or continue from it: what differs from its preset, and nothing else."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cflat._errors import ConfigError
from cflat.config.choices import parse_optimizer
from cflat.config.documents import Layer, flatten, merge, parse_overrides
from cflat.config.presets import PRESETS, default_preset, resolve_config
from cflat.config.run_config import RunConfig

MAX_ROUNDS = 4
"""A key that is added can change the preset's values of others; a few rounds settle it."""


def reproduce_command(config: RunConfig) -> str | None:
    """Return the ``cflat run`` that resolves to this configuration; None if no command line does.

    A configuration without a preset is spelled out against the one that its dataset usually starts from.
    """
    overrides = _overrides_of(config)
    if overrides is None:
        return None
    options = {"--optimizer": config.optimizer.name, "--preset": _preset_option(config), "--seed": str(config.seed)}
    return _command("run", config, options, overrides)


def compare_command(config: RunConfig, optimizers: Sequence[str], **settings: float) -> str:
    """Return the ``cflat compare`` of several optimizers around a run, with settings that the optimizers share.

    It has three seeds, and the run's other settings where a command line can express them.
    """
    # The optimizers of the comparison bring settings of their own.
    plain = replace(config, optimizer=parse_optimizer({"name": "none"}))
    overrides = {key: value for key, value in (_overrides_of(plain) or {}).items() if not key.startswith("optimizer.")}
    shared = {f"optimizer.{key}": value for key, value in settings.items()}
    options = {"--optimizers": ",".join(optimizers), "--preset": _preset_option(config), "--seeds": "0,1,2"}
    return _command("compare", config, options, {**overrides, **shared})


def _command(name: str, config: RunConfig, options: Mapping[str, str | None], keys: Mapping[str, Any]) -> str:
    # Options before keys, as in the documentation.
    named = {"--method": config.method.name, "--data": config.data.name, **options}
    words = [word for option, value in named.items() if value is not None for word in (option, value)]
    return shlex.join(["cflat", name, *words, *(override(key, value) for key, value in keys.items())])


def _preset(config: RunConfig) -> str:
    return config.preset if config.preset in PRESETS else default_preset(config.data.name)


def _preset_option(config: RunConfig) -> str | None:
    return None if _preset(config) == default_preset(config.data.name) else _preset(config)


def _overrides_of(config: RunConfig) -> dict[str, Any] | None:
    """Return the keys in which a configuration differs from its preset; None if no keys lead there."""
    names = {key: {"name": getattr(config, key).name} for key in ("method", "data", "optimizer")}
    start: Layer = {**names, "preset": _preset(config), "seed": config.seed}
    target = flatten({**config.to_dict(), "preset": _preset(config)})
    overrides: dict[str, Any] = {}
    for _ in range(MAX_ROUNDS):
        layer = parse_overrides([override(key, value) for key, value in overrides.items()])
        try:
            found = flatten(resolve_config(merge(start, layer)).to_dict())
        except ConfigError:
            # Some backbones need explicit weights; no other error goes away with them.
            if "backbone.weights" in overrides:
                return None
            overrides["backbone.weights"] = target["backbone.weights"]
            continue
        missing = {key: value for key, value in target.items() if key not in found or found[key] != value}
        if not missing:
            return overrides
        overrides |= missing
    return None


def override(key: str, value: Any) -> str:
    """Return ``key=value`` as the command line reads it back.

    >>> override("runtime.threads", None), override("runtime.precision", "16"), override("data.root", "/data")
    ('runtime.threads=null', 'runtime.precision="16"', 'data.root=/data')
    """
    with suppress(ConfigError):
        # Text that YAML would read as a number must be quoted.
        if isinstance(value, str) and parse_overrides([f"key={value}"])["key"] == value:
            return f"{key}={value}"
    return f"{key}={json.dumps(value)}"
