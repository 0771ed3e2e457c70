"""`RunConfig`: everything that decides a run, as one tree of settings.

Files and command lines are read into layers of plain values (`documents`), completed by a preset (`presets`), and
checked here: section by section (`validation`), then as a whole (`checks`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_jsonable_python

from cflat._errors import ConfigError
from cflat._settings import CountOrZero, settings_class
from cflat.config.checks import check_together
from cflat.config.choices import Choice, parse_method, parse_optimizer
from cflat.config.documents import Layer, merge
from cflat.config.settings import BackboneSettings, DataSettings, StreamSettings
from cflat.config.validation import parse_section, quote, require_mapping
from cflat.config.yaml_text import dump_yaml
from cflat.train.settings import BaseSettings, RuntimeSettings, TrainSettings

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

    def fingerprint(self) -> str:
        """Return a hash that no other configuration has."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> Layer:
        """Return plain values, in the order of declaration; `parse_config` reads them back."""
        values: Layer = to_jsonable_python(self, inf_nan_mode="constants")
        chosen = {key: {"name": values[key]["name"], **values[key]["settings"]} for key in ("method", "optimizer")}
        return {**values, **chosen}

    def to_yaml(self) -> str:
        """Return the configuration as the text of a YAML file."""
        return dump_yaml(self.to_dict())


def parse_config(values: Mapping[str, Any]) -> RunConfig:
    """Check a configuration; what is not given keeps the default of its section."""
    given = merge(require_mapping(values, "The configuration"))
    sections = {key: {} if given.get(key) is None else given[key] for key in ("method", "optimizer", *SECTIONS)}
    sections["backbone"] = _read_normalize(sections["backbone"])
    parsed = {
        "method": parse_method(sections["method"]),
        "optimizer": parse_optimizer(sections["optimizer"]),
        **{key: parse_section(cls, sections[key], key) for key, cls in SECTIONS.items()},
    }
    config: RunConfig = parse_section(RunConfig, {**given, **parsed}, "")
    check_together(config.method, config.stream, config.data, config.backbone, config.base, config.runtime)
    return config


def _read_normalize(section: object) -> Layer:
    """Replace ``normalize: timm`` or ``normalize: pilot`` by the input recipe of that name."""
    backbone = dict(require_mapping(section, "backbone"))
    if "normalize" not in backbone:
        return backbone
    value = backbone.pop("normalize")
    recipes = {"timm": "timm", "pilot": "pilot", True: "timm", False: "pilot"}
    if not isinstance(value, str | bool) or value not in recipes:
        raise ConfigError(f"backbone.normalize must be timm or pilot, got {quote(value)}.")
    return {**backbone, "inputs": recipes[value]}
