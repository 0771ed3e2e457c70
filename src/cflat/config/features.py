"""The configuration of a computation of features: images, network, inputs and device of a run that trains nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cflat._errors import ConfigError
from cflat.config.checks import backbone_family
from cflat.config.documents import merge
from cflat.config.run_config import RunConfig, parse_config

SECTIONS = ("data", "backbone", "runtime")
_DEFAULTS = {"method": {"name": "simplecil"}, "optimizer": {"name": "none"}, "backbone": {"inputs": "timm"}}


def features_config(chosen: Mapping[str, Any]) -> RunConfig:
    """Complete and check what a user has chosen; inputs are normalised as the weights expect unless it says otherwise.

    Args:
        chosen: Values of the sections ``data``, ``backbone`` and ``runtime``.

    Raises:
        ConfigError: If something is unknown, wrong, missing, or of another section.
    """
    for key in chosen:
        if key not in SECTIONS:
            raise ConfigError(f"Features depend on {', '.join(SECTIONS)} alone; leave {key} out.")
    for section, example in (("data", "--data cifar100"), ("backbone", "--backbone vit_tiny")):
        if not isinstance(chosen.get(section), Mapping) or "name" not in chosen[section]:
            raise ConfigError(f"{section}.name must be given, for example {example}.")
    config = parse_config(merge(_DEFAULTS, chosen))
    if config.data.validation or config.data.label_noise:
        raise ConfigError("Features are those of all images; give data.validation and data.label_noise to the runs.")
    if backbone_family(config.backbone.name) == "vit" and "weights" not in chosen["backbone"]:
        raise ConfigError("backbone.weights must be given: --weights FILE, timm to download them, or random.")
    return config
