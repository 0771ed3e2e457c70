"""The table in which every optimizer file enters itself, and optimizers made from their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from cflat._registry import Registry, suggest
from cflat.optim._base import SharpnessAware

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
    title: str
    """Its name as papers write it."""
    peak_buffers: int = 2
    """Gradient-sized buffers during a pass, those that it keeps between steps included."""
    persistent_buffers: int = 0
    """Gradient-sized buffers that it keeps between steps."""
    has_own_radius: bool = False
    """Whether its radius is measured otherwise than SAM's, so that values for SAM say nothing about it."""
    paper: str = ""
    """Where it comes from."""


OPTIMIZERS: Registry[OptimizerSpec] = Registry("optimizer")


def register_optimizer(name: str, *, summary: str, evaluations: str, title: str = "", **more: Any) -> Callable[[C], C]:
    """Enter the decorated class into the table under ``name``; ``more`` are further fields of `OptimizerSpec`."""

    def register(cls: C) -> C:
        OPTIMIZERS.add(name, OptimizerSpec(name, cls, summary, evaluations, title or name, **more))
        return cls

    return register


def create_optimizer(name: str, base: Optimizer, *, model: nn.Module | None = None, **settings: Any) -> SharpnessAware:
    """Wrap ``base`` in the optimizer called ``name``.

    Args:
        name: One of `list_optimizers`; ``-`` is accepted for ``_``.
        base: The torch optimizer that applies the direction.
        model: The module whose buffers extra evaluations must leave alone; optional.
        **settings: The keywords of that optimizer's class; an unknown one raises ValueError.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> create_optimizer("sam", torch.optim.SGD(model.parameters(), lr=0.1), rho=0.1)
    SAM(rho=0.1, base=SGD)
    """
    cls = get_optimizer_spec(name).cls
    known = optimizer_settings(name)
    for key in settings:
        if key not in known:
            raise ValueError(
                f"{name} has no setting {key!r}.{suggest(key, list(known))} It takes: {', '.join(known) or 'none'}."
            )
    return cls(base, model=model, **settings)


def get_optimizer_spec(name: str) -> OptimizerSpec:
    """Return the entry of ``name``: class, summary, cost and origin."""
    return OPTIMIZERS[name]


def list_optimizers(pattern: str = "*") -> list[str]:
    """Return the names that match a shell pattern.

    >>> list_optimizers("c_flat*")
    ['c_flat', 'c_flat_forecast', 'c_flat_plus', 'c_flat_turbo']
    """
    return OPTIMIZERS.names(pattern)


def optimizer_settings(name: str) -> dict[str, Any]:
    """Return the keywords of an optimizer with their defaults, without ``base`` and ``model``.

    >>> optimizer_settings("c_flat")
    {'rho': 0.05, 'lam': 0.2, 'rho_fd': None, 'options': None}
    """
    parameters = inspect.signature(get_optimizer_spec(name).cls.__init__).parameters
    others = [p for key, p in parameters.items() if key not in ("self", "base", "model")]
    return {p.name: p.default for p in others if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
