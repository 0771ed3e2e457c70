"""The table in which every method file enters itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from cflat._registry import Registry
from cflat.data.stream import Scenario
from cflat.methods._base import Method

__all__ = ["METHODS", "MethodSpec", "register_method"]

C = TypeVar("C", bound=type[Method])


@dataclass(frozen=True)
class MethodSpec:
    """What a user wants to know about a method before choosing it."""

    name: str
    cls: type[Method]
    config: type[Any]
    """Frozen dataclass of the method's settings, a docstring under each field."""
    summary: str
    scenarios: tuple[Scenario, ...]
    needs_memory: bool
    families: tuple[str, ...]
    """Backbone families that it runs on."""
    is_pretrained: bool
    """Whether it is meant for pretrained weights."""
    is_batchwise: bool
    """Whether its answer to an image can depend on the test batch that it is in."""
    paper: str


METHODS: Registry[MethodSpec] = Registry("method")


def register_method(
    name: str,
    *,
    config: type[Any],
    summary: str,
    scenarios: tuple[Scenario, ...] = ("class", "task"),
    needs_memory: bool = False,
    families: tuple[str, ...] = ("vit", "resnet", "other"),
    is_pretrained: bool = False,
    is_batchwise: bool = False,
    paper: str = "",
) -> Callable[[C], C]:
    """Enter the decorated class into the table under ``name``; it is made as ``cls(config, backbone, info)``."""

    def register(cls: C) -> C:
        spec = MethodSpec(
            name, cls, config, summary, scenarios, needs_memory, families, is_pretrained, is_batchwise, paper
        )
        METHODS.add(name, spec)
        return cls

    return register
