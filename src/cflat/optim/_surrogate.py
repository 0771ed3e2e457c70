"""How far a surrogate is from what it stands for: the one number that decides whether reuse pays.

C-Flat adds an increment d to the gradient g. A rule that saves evaluations adds d^ = a g + c |g| u instead, with a
cached unit direction u. Its error is e = |d^ - d| / |d|: plain training (d^ = 0) has e = 1 by definition, and a rule
with e >= 1 is farther from C-Flat than doing nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_PARALLEL = 1e-6
"""Sine of an angle that rounding cannot be told from."""


@dataclass(frozen=True, slots=True)
class Products:
    """The inner products from which coefficients and errors follow, without another vector operation."""

    g: float
    """|g|, above 0."""
    d: float
    """|d|, above 0."""
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
    def v(self) -> float:
        """|v|."""
        alpha = self.dg / self.g
        # Factored: d^2 - alpha^2 would cancel where d is nearly parallel to g.
        return math.sqrt(max((self.d - alpha) * (self.d + alpha), 0.0))


def surrogate_errors(p: Products, a: float, c: float) -> tuple[float, float]:
    """Return e of d^ = a g + c |g| u, and its part orthogonal to g relative to that of d.

    Both are lengths over orthogonal axes, so that no small difference of large squares decides: along g, along the
    part of u orthogonal to g, and the rest of d.
    """
    cosine = p.gu / p.g
    sine = math.sqrt(max(1.0 - cosine**2, 0.0))  # the length of u's part orthogonal to g
    d_u = p.vu / sine if sine > _PARALLEL else 0.0
    rest = math.sqrt(max((p.v - d_u) * (p.v + d_u), 0.0))
    along, across = (a + c * cosine) * p.g - p.dg / p.g, math.hypot(c * p.g * sine - d_u, rest)
    v = math.hypot(d_u, rest)
    return math.hypot(along, across) / p.d, across / v if v > _PARALLEL * p.d else 0.0
