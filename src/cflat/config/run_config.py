"""`RunConfig`: everything that decides a run, as one tree of settings.

Files and command lines are read into layers of plain values (`documents`), completed by a preset (`presets`), and
checked here: section by section (`validation`), then as a whole (`checks`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from cflat._errors import ConfigError
from cflat._settings import CountOrZero, settings_class
from cflat.config.checks import check_together
from cflat.config.choices import Choice, parse_method, parse_optimizer
from cflat.config.documents import CHOICES, Layer
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
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    def to_yaml(self) -> str:
        """Return the configuration as the text of a YAML file."""
        return dump_yaml(self.to_dict())


def parse_config(values: Mapping[str, Any]) -> RunConfig:
    """Check a configuration; what is not given keeps the default of its section."""
    given = require_mapping(values, "The configuration")
    sections = {key: _section(given, key) for key in ("method", "optimizer", *SECTIONS)}
    sections["backbone"] = _read_normalize(sections["backbone"])
    parsed = {
        "method": parse_method(sections["method"]),
        "optimizer": parse_optimizer(sections["optimizer"]),
        **{key: parse_section(cls, sections[key], key) for key, cls in SECTIONS.items()},
    }
    config: RunConfig = parse_section(RunConfig, {**given, **parsed}, "")
    check_together(config.method, config.stream, config.data, config.backbone, config.base, config.runtime)
    return config


def _section(values: Mapping[str, Any], key: str) -> Any:
    value = values.get(key)
    if value is None:
        return {}
    return {"name": value} if key in CHOICES and isinstance(value, str) else value


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


def _plain(value: Any) -> Any:
    if isinstance(value, Choice):
        return {"name": value.name, **_plain(value.settings)}
    if is_dataclass(value) and not isinstance(value, type):
        return {key: _plain(member) for key, member in asdict(value).items()}
    return [_plain(member) for member in value] if isinstance(value, list | tuple) else value
