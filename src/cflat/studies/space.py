"""The file of a sweep, and the combinations of settings that it stands for.

What is drawn at random is a pure function of the seed, draw by draw and axis by axis. More draws, or further values and
axes, keep those that were there, and their finished runs are reused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias
from zlib import crc32

import numpy as np
from pydantic import Field

from cflat._errors import ConfigError
from cflat._settings import Count, CountOrZero, Number, settings_class
from cflat.config.choices import own_settings, require_shared_settings
from cflat.config.documents import CHOICES, Layer, merge, nested, read_document
from cflat.config.validation import parse_section, quote, require_mapping
from cflat.config.variants import parse_variant

MAX_COMBINATIONS = 10_000
MAX_RUNS = 10_000
MAX_MISSES = 1000
"""Draws in a row that give nothing new before the range counts as exhausted."""
DRAWN_DIGITS = 4
"""Significant digits of drawn numbers: folders are named after them."""

Settings: TypeAlias = "dict[str, Any]"
"""One combination: values by dotted key."""


@settings_class
class Interval:
    """A range that numbers are drawn from."""

    low: Number = 0.0
    high: Number = 1.0
    scale: Literal["linear", "log"] = "linear"
    """log draws uniformly between the logarithms."""

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high

    def at(self, fraction: float) -> float:
        """Return the number at a fraction of the way from low to high."""
        if self.scale == "log":
            return self.rounded(math.exp(math.log(self.low) + fraction * (math.log(self.high) - math.log(self.low))))
        return self.rounded(self.low + fraction * (self.high - self.low))

    def rounded(self, exact: float) -> float:
        """Return a number within the range with as many digits as folders are named after."""
        return min(max(float(f"{exact:.{DRAWN_DIGITS}g}"), self.low), self.high)


@settings_class
class _File:
    """The keys of a sweep file: what to vary, around what, with which seeds."""

    name: str | None = None
    base: dict[str, Any] = field(default_factory=dict)
    """What all runs share; settings under ``optimizer`` go to those that have them."""
    axes: dict[str, Any] = field(default_factory=dict)
    """By dotted key: the values to try, or the range to draw from."""
    seeds: tuple[CountOrZero, ...] = (0,)
    sample: Annotated[Count, Field(le=10_000)] | None = None
    """Take so many of the combinations; None takes all."""
    sample_seed: CountOrZero = 0


@settings_class
class Sweep(_File):
    """A sweep with a name and checked axes, each a tuple of values or an `Interval`."""

    name: str
    tuned: Mapping[str, Settings] = field(default_factory=dict)
    """Settings that belong to values of ``optimizer.name``, over everything else."""

    def combinations(self) -> list[Settings]:
        """Return what to run, without settings that a combination's optimizer does not have; each once."""
        lists = [axis for axis in self.axes.values() if not isinstance(axis, Interval)]
        if len(lists) < len(self.axes):
            return self._drawn()
        number = math.prod(map(len, lists))
        if number > MAX_COMBINATIONS:
            raise ConfigError(
                f"sweep.axes make {number} combinations, more than {MAX_COMBINATIONS}; list fewer values."
            )
        every = [self._own(dict(zip(self.axes, chosen, strict=True))) for chosen in product(*lists)]
        distinct = {_text(own): own for own in every}  # without a setting that it lacks, it may equal another
        texts = list(distinct)
        if self.sample is not None:
            # Ordered by a hash of each: adding a value to an axis does not exchange the whole sample.
            texts = sorted(texts, key=lambda text: _uniform(self.sample_seed, text))[: self.sample]
        return [distinct[text] for text in texts]

    def layer(self, settings: Settings) -> Layer:
        """Return the whole configuration of a combination, as for `resolve_config`; the seed is not part of it."""
        chosen = merge(*(nested(key, value) for key, value in settings.items()))
        shared = {key: value for key, value in self.base.items() if key != "optimizer"}
        own = {key: value for key, value in chosen.items() if key != "optimizer"}
        optimizer = {**self._optimizer, **chosen.get("optimizer", {})}
        variant = parse_variant(optimizer["name"])
        section = {"optimizer": own_settings(optimizer, variant.name)}
        tuned = (nested(key, value) for key, value in self.tuned.get(variant.text, {}).items())
        return merge(shared, own, section, variant.layer, *tuned)

    @property
    def _optimizer(self) -> Layer:
        """The optimizer section of the base."""
        section = merge({"optimizer": self.base.get("optimizer") or {}})["optimizer"]
        return {"name": "none", **require_mapping(section, "sweep.base.optimizer")}

    def _drawn(self) -> list[Settings]:
        """Draw until there are enough that differ."""
        found: dict[str, Settings] = {}
        misses = draw = 0
        while len(found) < (self.sample or 0) and misses < MAX_MISSES:
            drawn = {}
            for key, axis in self.axes.items():
                fraction = _uniform(self.sample_seed, key, draw)
                drawn[key] = axis.at(fraction) if isinstance(axis, Interval) else axis[int(fraction * len(axis))]
            own = self._own(drawn)
            # Short ranges run out of numbers that differ in the digits that are kept.
            misses = misses + 1 if _text(own) in found else 0
            found.setdefault(_text(own), own)
            draw += 1
        return list(found.values())

    def _own(self, settings: Settings) -> Settings:
        """Leave out what the combination's optimizer does not have."""
        name = settings["optimizer.name"] if "optimizer.name" in settings else self._optimizer["name"]
        varied = {key: key.split(".")[1] for key in settings if key.startswith("optimizer.")}
        own = own_settings(dict.fromkeys(varied.values()), parse_variant(name).name)
        return {key: value for key, value in settings.items() if key not in varied or varied[key] in own}


def read_sweep(path: str | Path) -> Sweep:
    """Read the file of a sweep; without a name, it is called like the file."""
    return parse_sweep(read_document(path), Path(path).stem)


def parse_sweep(document: Mapping[str, Any], name: str = "sweep") -> Sweep:
    """Return the sweep that a document describes; ``name`` is for one that has none."""
    if isinstance(document, Mapping) and isinstance(document.get("axes"), Mapping):
        require_mapping(document["axes"], "sweep.axes")  # pydantic would turn a number that is a key into text
    file: _File = parse_section(_File, document, "sweep")
    if not file.axes:
        raise ConfigError("sweep.axes must name at least one key to vary, for example optimizer.rho: [0.02, 0.05].")
    if not file.seeds or len(set(file.seeds)) < len(file.seeds):
        raise ConfigError(f"sweep.seeds must list different seeds, got {quote(list(file.seeds))}.")
    axes: dict[str, tuple[Any, ...] | Interval] = {}
    for key, values in file.axes.items():
        full = f"{key}.name" if key in CHOICES else key  # optimizer stands for optimizer.name
        if full in axes or not all(full.split(".")):
            raise ConfigError(f"sweep.axes must name keys once each, for example optimizer.rho, got {quote(key)}.")
        axes[full] = parse_axis(f"sweep.axes.{key}", values)
    if "seed" in axes or "seed" in file.base:
        raise ConfigError("seed is given for all runs together; list seeds under sweep.seeds.")
    ranges = [key for key, axis in axes.items() if isinstance(axis, Interval)]
    if ranges and file.sample is None:
        raise ConfigError(f"sweep.axes.{ranges[0]} is a range, so sweep.sample must say how many runs to draw.")
    sweep = Sweep(**{**vars(file), "name": file.name or name, "axes": axes})
    _require_known_settings(sweep)
    number = math.prod(len(axis) for axis in axes.values() if not isinstance(axis, Interval))
    number = (number if file.sample is None else file.sample if ranges else min(number, file.sample)) * len(file.seeds)
    if number > MAX_RUNS:
        raise ConfigError(f"The sweep has {number} runs, more than {MAX_RUNS}; list fewer values or seeds.")
    return sweep


def describe(settings: Settings) -> str:
    """Return a combination as it would be typed.

    >>> describe({"optimizer.name": "sam", "optimizer.rho": 0.1})
    'optimizer.name=sam, optimizer.rho=0.1'
    """
    return ", ".join(f"{key}={value_text(value)}" for key, value in settings.items())


def value_text(value: Any) -> str:
    """Return a value as it would be typed."""
    return value if isinstance(value, str) else json.dumps(value)


def parse_axis(path: str, values: object) -> tuple[Any, ...] | Interval:
    """Return the values to try, or the range to draw from; ``path`` is its name in messages."""
    if isinstance(values, Mapping):
        interval: Interval = parse_section(Interval, values, path)
        is_log = interval.scale == "log"
        if not {"low", "high"} <= set(values) or interval.low >= interval.high or (is_log and interval.low <= 0):
            raise ConfigError(f"{path} must have numbers {'0 < ' * is_log}low < high, got {quote(dict(values))}.")
        return interval
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{path} must list values, for example [0.02, 0.05], got {quote(values)}.")
    try:
        texts = {json.dumps(value, sort_keys=True) for value in values}  # lists and mappings have no hash
    except (TypeError, ValueError):
        raise ConfigError(f"{path} must list numbers, text, lists or mappings, got {quote(values)}.") from None
    if len(texts) < len(values):
        raise ConfigError(f"{path} must list different values, got {quote(values)}.")
    return tuple(values)


def _require_known_settings(sweep: Sweep) -> None:
    """Reject an optimizer setting that no optimizer of the sweep has: it would be left out everywhere."""
    shared = sweep._optimizer
    names = sweep.axes.get("optimizer.name", (shared["name"],))
    if isinstance(names, Interval):
        raise ConfigError("sweep.axes.optimizer.name must list optimizers, not a range.")
    varied = [key.split(".")[1] for key in sweep.axes if key.startswith("optimizer.")]
    require_shared_settings([*shared, *varied], [parse_variant(name).name for name in names])


def _uniform(seed: int, text: str, number: int = 0) -> float:
    """Return a number in [0, 1) that depends on these alone."""
    # Not hash(), which differs between processes.
    return float(np.random.default_rng([seed, crc32(text.encode()), number]).random())


def _text(settings: Settings) -> str:
    return json.dumps(settings, sort_keys=True)
