"""`RunConfig`: everything that decides a run, as one tree of settings.

Files and command lines are read into layers of plain values (`documents`), completed by a preset (`presets`), and
checked here: section by section (`validation`), then as a whole (`checks`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic_core import to_jsonable_python

from cflat._errors import ConfigError
from cflat._files import plain_values
from cflat._settings import NEUTRAL, CountOrZero, settings_class
from cflat.config.checks import check_together
from cflat.config.choices import Choice, parse_base, parse_method, parse_optimizer
from cflat.config.documents import Layer, dump_yaml, flatten, merge
from cflat.config.sections import BackboneSettings, DataSettings, StreamSettings
from cflat.config.validation import parse_section, quote, require_mapping
from cflat.train.settings import BaseSettings, RuntimeSettings, TrainSettings

IMAGES, CLASSES = "images (their hash)", "tasks and class names (their hash)"
"""What a checkpoint knows of its run besides `RunConfig.identity`."""

SECTIONS: dict[str, type[Any]] = {
    "base": BaseSettings,
    "train": TrainSettings,
    "backbone": BackboneSettings,
    "data": DataSettings,
    "stream": StreamSettings,
    "runtime": RuntimeSettings,
}
"""The sections that look the same whatever is chosen."""


@settings_class
class RunConfig:
    """Everything that decides a run."""

    method: Choice
    """What is learned, and its settings."""
    optimizer: Choice
    """The flatness-aware wrapper, and its settings."""
    base: BaseSettings
    train: TrainSettings
    backbone: BackboneSettings
    data: DataSettings
    stream: StreamSettings
    runtime: RuntimeSettings
    seed: CountOrZero = 0
    """Random seed of the whole run but the class order and the choice of images."""
    preset: str = "custom"
    """The preset that the configuration started from."""

    def identity(self) -> Layer:
        """Return what decides the result, by dotted key: a run with other values is another run.

        Of ``folder:PATH`` and the like only the kind counts: the images there are compared by content. The file of the
        weights decides, too, but a checkpoint holds what was read from it, so it may be gone on resume.
        """
        # Defaults are part of it: a version with other defaults is another run.
        without = {*neutral_keys(), "backbone.weights"}
        values = {key: value for key, value in flatten(self.to_dict()).items() if key not in without}
        # As env.json holds them, with which they are compared: numbers that are not finite are null there.
        return {**plain_values(values), "data.name": self.data.name.partition(":")[0]}

    def changed(self, layer: Mapping[str, Any]) -> RunConfig:
        """Return the configuration with other settings, for a run that is resumed; those that decide are rejected."""
        other = parse_config(merge(self.to_dict(), layer))
        # Both ways: a key may be in one of them only, with another optimizer.
        before, after = self.identity(), other.identity()
        for key in (*after, *before):
            if before.get(key) != after.get(key):
                raise ConfigError(
                    f"{key} cannot be changed from {before.get(key)!r:.80} to {after.get(key)!r:.80} on resume: that "
                    f"would be another run. These can: backbone.weights, {', '.join(neutral_keys())}."
                )
        return other

    def differences(self, other: RunConfig) -> Layer:
        """Return the values of another configuration that differ from this one's, by dotted key."""
        before = flatten(self.to_dict())
        return {key: value for key, value in flatten(other.to_dict()).items() if before.get(key) != value}

    def fingerprint(self) -> str:
        """Return a hash that no other configuration has."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> Layer:
        """Return plain values, in the order of declaration; `parse_config` reads them back."""
        values: Layer = to_jsonable_python(self, inf_nan_mode="constants")
        chosen = {key: {"name": values[key]["name"], **values[key]["settings"]} for key in ("method", "optimizer")}
        base = {key: value for key, value in values["base"].items() if key != "keywords"}
        return {**values, **chosen, "base": {**base, **values["base"]["keywords"]}}

    def to_yaml(self) -> str:
        """Return the configuration as the text of a YAML file."""
        return dump_yaml(self.to_dict())


@cache
def neutral_keys() -> tuple[str, ...]:
    """Return the dotted keys that are marked as not changing the result."""
    return tuple(
        f"{section}.{name}"
        for section, cls in SECTIONS.items()
        for name, field in cls.__pydantic_fields__.items()
        if NEUTRAL in field.metadata
    )


def parse_config(values: Mapping[str, Any], *, is_past: bool = False) -> RunConfig:
    """Check a configuration; what is not given keeps the default of its section.

    ``is_past`` is for reading what was run: names may be those of plug-ins that are not here.
    """
    given = merge(require_mapping(values, "The configuration"))  # method: ease becomes method: {name: ease}
    # An empty section of a YAML file is null.
    sections = {key: {} if given.get(key) is None else given[key] for key in ("method", "optimizer", *SECTIONS)}
    sections["backbone"] = _read_normalize(sections["backbone"])
    parsed = {
        "method": parse_method(sections["method"], is_past=is_past),
        "optimizer": parse_optimizer(sections["optimizer"], is_past=is_past),
        "base": parse_base(sections["base"]),
        **{key: parse_section(cls, sections[key], key) for key, cls in SECTIONS.items() if key != "base"},
    }
    config: RunConfig = parse_section(RunConfig, {**given, **parsed}, "")
    # check_together looks names up, which fails for plug-ins that are not here.
    if not is_past:
        check_together(**{key: value for key, value in parsed.items() if key != "optimizer"})
    return config


def _read_normalize(section: object) -> Layer:
    """Replace ``normalize: timm`` or ``normalize: pilot`` by the kind of inputs of that name."""
    backbone = dict(require_mapping(section, "backbone"))
    if "normalize" not in backbone:
        return backbone
    value = backbone.pop("normalize")
    # PILOT does not normalize its inputs, so true and false name the two kinds as well.
    kinds = {"timm": "timm", "pilot": "pilot", True: "timm", False: "pilot"}
    if not isinstance(value, str | bool) or value not in kinds:
        raise ConfigError(f"backbone.normalize must be timm or pilot, got {quote(value)}.")
    return {**backbone, "inputs": kinds[value]}
