"""The table in which every method file enters itself, and methods made from their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from cflat._registry import Registry, require_known
from cflat.data.stream import Scenario
from cflat.methods._base import Method, StreamInfo
from cflat.nn.backbone import Backbone

C = TypeVar("C", bound=type[Method])


@dataclass(frozen=True)
class MethodSpec:
    """What a user wants to know about a method before choosing it."""

    name: str
    cls: type[Method]
    config: type[Any]
    """Frozen dataclass of the method's settings, a docstring under each field."""
    summary: str
    scenarios: tuple[Scenario, ...] = ("class", "task")
    needs_memory: bool = False
    families: tuple[str, ...] = ("vit", "resnet", "other")
    """Backbone families that it runs on."""
    is_pretrained: bool = False
    """Whether it is meant for pretrained weights."""
    is_batchwise: bool = False
    """Whether its answer to an image can depend on the test batch that it is in."""
    is_shardable: bool = True
    """Whether its network can be spread over ranks: it neither copies nor merges blocks."""
    is_online: bool = False
    """Whether it sees every batch once and can answer at any time: no statistics over a task, no phases of its own."""
    paper: str = ""

    @property
    def scores(self) -> tuple[str, ...]:
        """Ways in which it answers, the headline first: the one that its paper reports."""
        return self.cls.scores

    def score(self, wanted: str | None) -> str:
        """Return the score that the user asks for, or the headline; one that it does not have is an error."""
        if wanted is not None:
            require_known(f"score of {self.name}", wanted, self.scores)
        return wanted or self.scores[0]


METHODS: Registry[MethodSpec] = Registry("method")


def register_method(name: str, *, config: type[Any], summary: str, **more: Any) -> Callable[[C], C]:
    """Enter the decorated class into the table under ``name``; it is made as ``cls(config, backbone, info)``.

    ``more`` are further fields of `MethodSpec`.
    """

    def register(cls: C) -> C:
        METHODS.add(name, MethodSpec(name, cls, config, summary, **more))
        return cls

    return register


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
    # Methods are made from three arguments, their base class from `info` alone.
    make: Callable[..., Method] = spec.cls
    return make(spec.config() if config is None else config, backbone, info)


def get_method_spec(name: str) -> MethodSpec:
    """Return the entry of ``name``: class, settings, scenarios and origin."""
    return METHODS[name]


def list_methods(pattern: str = "*") -> list[str]:
    """Return the names that match a shell pattern."""
    return METHODS.names(pattern)
