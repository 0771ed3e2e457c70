"""Make an optimizer from its name; every file of this folder that registers one is found by itself."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cflat._registry import suggest
from cflat.optim._base import SharpnessAware
from cflat.optim._catalog import OPTIMIZERS, OptimizerSpec

__all__ = ["create_optimizer", "get_optimizer_spec", "list_optimizers", "optimizer_settings"]


def create_optimizer(name: str, base: Optimizer, *, model: nn.Module | None = None, **settings: Any) -> SharpnessAware:
    """Wrap ``base`` in the optimizer called ``name``.

    Args:
        name: One of `list_optimizers`; ``-`` is accepted for ``_``.
        base: The torch optimizer that applies the direction.
        model: The module whose buffers extra evaluations must leave alone; optional.
        **settings: The keywords of that optimizer's class; an unknown one is refused.

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
    ['c_flat', 'c_flat_plus', 'c_flat_turbo']
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


def _discover() -> None:
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not module.name.startswith("_") and module.name != "factory":
            importlib.import_module(f"cflat.optim.{module.name}")


_discover()
