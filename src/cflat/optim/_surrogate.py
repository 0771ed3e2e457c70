"""How far a surrogate is from what it stands for: the one number that decides whether reuse pays.

C-Flat adds an increment d to the gradient g. A rule that saves evaluations adds d^ = a g + c |g| u instead, with a
cached unit direction u. Its error is e = |d^ - d| / |d|: plain training (d^ = 0) has e = 1 by definition, and a rule
with e >= 1 is farther from C-Flat than doing nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Products:
    """The inner products from which coefficients and errors follow, without another vector operation."""

    g: float
    """|g|."""
    d: float
    """|d|."""
    dg: float
    """<d, g>."""
    du: float = 0.0
    """<d, u>; 0 if there is no cached direction."""
    gu: float = 0.0
    """<g, u>."""

    @property
    def along(self) -> float:
        """The coefficient of d along g."""
        return self.dg / self.g**2

    @property
    def vu(self) -> float:
        """<v, u>, where v = d - along g is the part of d orthogonal to g."""
        return self.du - self.along * self.gu

    @property
    def v_squared(self) -> float:
        """|v|^2."""
        return max(self.d**2 - self.along * self.dg, 0.0)


def surrogate_errors(p: Products, a: float, c: float) -> tuple[float, float]:
    """Return e of d^ = a g + c |g| u, and its part orthogonal to g relative to that of d."""
    length = c * p.g
    squared = (a * p.g) ** 2 + length**2 + 2 * a * length * p.gu - 2 * a * p.dg - 2 * length * p.du + p.d**2
    u_squared = 1.0 - (p.gu / p.g) ** 2  # of u's part orthogonal to g
    across = length**2 * u_squared - 2 * length * p.vu + p.v_squared
    is_parallel = p.v_squared <= 1e-12 * p.d**2  # then there is nothing across to be wrong about
    return _ratio(squared, p.d**2), 0.0 if is_parallel else _ratio(across, p.v_squared)


def _ratio(part: float, whole: float) -> float:
    return math.sqrt(max(part, 0.0) / whole)
