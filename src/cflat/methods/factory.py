"""Make a method from its name; every file of this folder that registers one is found by itself."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

from cflat.methods._base import Method, StreamInfo
from cflat.methods._catalog import METHODS, MethodSpec
from cflat.nn.backbone import Backbone

__all__ = ["create_method", "get_method_spec", "list_methods"]


def create_method(name: str, backbone: Backbone, info: StreamInfo, config: Any = None) -> Method:
    """Build the method called ``name`` on ``backbone``.

    Args:
        name: One of `list_methods`.
        backbone: The network it starts from; the method takes it over.
        info: What is known of the stream.
        config: The method's settings; None takes its defaults.
    """
    spec = METHODS[name]
    if backbone.family not in spec.families:
        raise ValueError(f"{name} runs on {', '.join(spec.families)} backbones, not on {backbone.name}.")
    if info.scenario not in spec.scenarios:
        raise ValueError(f"{name} runs on {', '.join(spec.scenarios)} streams, not on a {info.scenario} stream.")
    make: Any = spec.cls
    method: Method = make(spec.config() if config is None else config, backbone, info)
    return method


def get_method_spec(name: str) -> MethodSpec:
    """Return the entry of ``name``: class, settings, scenarios and origin."""
    return METHODS[name]


def list_methods(pattern: str = "*") -> list[str]:
    """Return the names that match a shell pattern."""
    return METHODS.names(pattern)


def _discover() -> None:
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not module.name.startswith("_") and module.name != "factory":
            importlib.import_module(f"cflat.methods.{module.name}")


_discover()
