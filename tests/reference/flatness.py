"""The first-order family: GAM, C-Flat and C-Flat++."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from reference.space import Algorithm, Gradient, norm, orthogonal, unit


class GAM(Algorithm):
    """Accelerated GAM (optimizers.md 5.1): d - gamma (m - proj_d m), d = b1 g1 + b3 g3, m = g + |b2| g2."""

    def __init__(
        self, rho: float, rho_fd: float, gamma: float, betas: tuple[float, float, float] = (0.6, 0.5, 0.4)
    ) -> None:
        super().__init__(rho)
        self.rho_fd, self.gamma, self.betas = rho_fd, gamma, betas

    def direction(self, theta: Tensor, gradient: Gradient) -> Tensor:
        b1, b2, b3 = self.betas
        g = gradient(theta)
        e0 = self.rho_fd * unit(g)
        g1 = gradient(theta + e0)
        e1 = self.rho * unit(g1 - g)
        g2 = gradient(theta + e1)
        g3 = gradient(theta + e1 + self.rho_fd * unit(g2))
        d = b1 * g1 + b3 * g3
        m = g + abs(b2) * g2
        return d - self.gamma * orthogonal(m, d)


def c_flat_direction(
    theta: Tensor, gradient: Gradient, g: Tensor, rho: float, rho_fd: float | None, lam: float
) -> Tensor:
    """g_s + lam g_f with Eq. 4, 5 and the factor rho / rho' of Eq. 12 in the appendix."""
    rho_fd = rho if rho_fd is None else rho_fd
    g_s = gradient(theta + rho * unit(g))
    theta_p = theta + rho * unit(g_s - g)
    g_0 = gradient(theta_p)
    g_1 = gradient(theta_p + rho_fd * unit(g_0))
    g_f = rho / rho_fd * (g_1 - g_0)
    return g_s + lam * g_f


class CFlat(Algorithm):
    """g_s + lam g_f."""

    def __init__(self, rho: Any, lam: float, rho_fd: float | None = None) -> None:
        super().__init__(rho)
        self.lam, self.rho_fd = lam, rho_fd

    def direction(self, theta: Tensor, gradient: Gradient) -> Tensor:
        return c_flat_direction(theta, gradient, gradient(theta), self.rho, self.rho_fd, self.lam)


class CFlatPlus(Algorithm):
    """C-Flat if E_t = A_t / (1 + exp(-k (t - t0))) - ||g|| <= 0, else g; A_{t+1} = A_t - cof E_t; t from 1."""

    def __init__(
        self,
        rho: float,
        lam: float,
        amplitude: float,
        steepness: float,
        midpoint: float,
        gain: float,
        rho_fd: float | None = None,
    ) -> None:
        super().__init__(rho)
        self.lam, self.rho_fd = lam, rho_fd
        self.initial, self.k, self.t0, self.cof = amplitude, steepness, midpoint, gain
        self.a_t = amplitude

    def start_task(self, index: int, num_tasks: int | None) -> None:
        super().start_task(index, num_tasks)
        self.a_t = self.initial

    def direction(self, theta: Tensor, gradient: Gradient) -> Tensor:
        g = gradient(theta)
        e_t = self.a_t / (1 + math.exp(-self.k * (self.j - self.t0))) - norm(g)
        self.a_t = self.a_t - self.cof * e_t
        if e_t > 0:
            return g
        return c_flat_direction(theta, gradient, g, self.rho, self.rho_fd, self.lam)
