"""The same optimizer with other settings: ``c_flat_turbo:reading=calibrated`` is name, settings and label in one text.

Wherever optimizers are listed (``compare``, ``tune``, sweeps), an entry may carry settings of its own, separated by
colons. A key without a dot is one of the optimizer's, any other key of a configuration is written in full:
``none:base.schedule=cosine``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any

from cflat._errors import ConfigError
from cflat.config.documents import Layer, merge, nested, parse_overrides
from cflat.optim import get_optimizer_spec

# Inside of brackets, a "]" follows before the next "[".
_OUTSIDE_BRACKETS = r"(?![^\[]*\])"


@dataclass(frozen=True)
class Variant:
    """An optimizer with settings of its own."""

    name: str
    """The optimizer."""
    settings: Mapping[str, Any]
    """By dotted key."""
    text: str
    """As it was written; what it is called everywhere."""

    @property
    def layer(self) -> Layer:
        """What it adds to a configuration."""
        return merge({"optimizer": {"name": self.name}}, *(nested(k, v) for k, v in self.settings.items()))

    @property
    def slug(self) -> str:
        """Its text as the name of a folder."""
        return re.sub(r"[^A-Za-z0-9._]+", "-", self.text).strip("-.")


def parse_variant(text: str) -> Variant:
    """Read an optimizer with settings of its own.

    >>> parse_variant("c_flat_turbo:reading=calibrated:base.lr=0.01").settings
    {'optimizer.reading': 'calibrated', 'base.lr': 0.01}
    """
    name, *parts = re.split(f":{_OUTSIDE_BRACKETS}", str(text).strip())
    name = get_optimizer_spec(name).name
    settings: dict[str, Any] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        key = key.strip() if "." in key else f"optimizer.{key.strip()}"
        if not equals or key in ("optimizer.", "optimizer.name") or key in settings:
            raise ConfigError(
                f"An optimizer with settings is written as c_flat_turbo:lam=0.1:k=10, each key once, got {text!r}."
            )
        # Parsed as on the command line, then taken out of the nested layer.
        settings[key] = reduce(getitem, key.split("."), parse_overrides([f"{key}={value}"]))
    return Variant(name, settings, ":".join([name, *(part.strip() for part in parts)]))


def list_variants(text: str) -> list[str]:
    """Return the entries of a list with commas; commas inside brackets belong to a value.

    >>> list_variants("none, sam:rho=0.1,none:base.milestones=[2,4]")
    ['none', 'sam:rho=0.1', 'none:base.milestones=[2,4]']
    """
    return [entry.strip() for entry in re.split(f",{_OUTSIDE_BRACKETS}", text) if entry.strip()]
