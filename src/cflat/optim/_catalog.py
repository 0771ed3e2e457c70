"""The table in which every optimizer file enters itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cflat._registry import Registry
from cflat.optim._base import SharpnessAware

__all__ = ["OPTIMIZERS", "OptimizerSpec", "register_optimizer"]

C = TypeVar("C", bound=type[SharpnessAware])


@dataclass(frozen=True)
class OptimizerSpec:
    """What a user wants to know about an optimizer before choosing it."""

    name: str
    cls: type[SharpnessAware]
    summary: str
    """What it does, in one line."""
    evaluations: str
    """Forward and backward passes per step."""
    kept: int
    """Gradient-sized buffers that it keeps between steps."""
    paper: str
    """Where it comes from."""


OPTIMIZERS: Registry[OptimizerSpec] = Registry("optimizer")


def register_optimizer(
    name: str, *, summary: str, evaluations: str, kept: int = 0, paper: str = ""
) -> Callable[[C], C]:
    """Enter the decorated class into the table under ``name``."""

    def register(cls: C) -> C:
        OPTIMIZERS.add(name, OptimizerSpec(name, cls, summary, evaluations, kept, paper))
        return cls

    return register
