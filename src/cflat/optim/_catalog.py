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
    title: str
    """Its name as papers write it."""
    summary: str
    """What it does, in one line."""
    evaluations: str
    """Forward and backward passes per step."""
    kept: int
    """Gradient-sized buffers that it keeps between steps."""
    has_own_radius: bool
    """Whether its radius is measured otherwise than SAM's, so that values for SAM say nothing about it."""
    paper: str
    """Where it comes from."""


OPTIMIZERS: Registry[OptimizerSpec] = Registry("optimizer")


def register_optimizer(
    name: str,
    *,
    summary: str,
    evaluations: str,
    title: str = "",
    kept: int = 0,
    has_own_radius: bool = False,
    paper: str = "",
) -> Callable[[C], C]:
    """Enter the decorated class into the table under ``name``; see `OptimizerSpec` for the other arguments."""

    def register(cls: C) -> C:
        OPTIMIZERS.add(name, OptimizerSpec(name, cls, title or name, summary, evaluations, kept, has_own_radius, paper))
        return cls

    return register
