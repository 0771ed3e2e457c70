"""Radii that change over time; pass one as ``rho=`` in place of a number.

A schedule is any callable ``(step, lr) -> rho``, where ``step`` counts from 0 and ``lr`` is the learning rate of the
first parameter group. These two are picklable and named as in the literature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from cflat._ranges import NotNegative, Positive, check, checked

Radius: TypeAlias = Positive | Callable[[int, float], float]


@checked
@dataclass(frozen=True)
class InverseSqrt:
    """Shrink as ``rho_0 / sqrt(t)``, t = 1, 2, ...: the schedule of the convergence theorem.

    >>> InverseSqrt(0.1)(step=3, lr=1.0)
    0.05
    """

    rho: Positive

    def __call__(self, step: int, lr: float) -> float:
        return float(self.rho / (step + 1) ** 0.5)


@checked
@dataclass(frozen=True)
class TiedToLR:
    """Follow the learning rate linearly from ``rho_min`` at ``lr_min`` to ``rho_max`` at ``lr_max``, as in GSAM.

    >>> TiedToLR(rho_max=0.2, lr_max=0.1)(step=0, lr=0.05)
    0.1
    """

    rho_max: float
    lr_max: float
    rho_min: NotNegative = 0.0
    lr_min: NotNegative = 0.0

    def __post_init__(self) -> None:
        check("rho_max", self.rho_max, above=self.rho_min)
        check("lr_max", self.lr_max, above=self.lr_min)

    def __call__(self, step: int, lr: float) -> float:
        # Clamped: during warm-up the rate may lie below lr_min, and the radius would become negative.
        share = min(max((lr - self.lr_min) / (self.lr_max - self.lr_min), 0.0), 1.0)
        return self.rho_min + (self.rho_max - self.rho_min) * share
