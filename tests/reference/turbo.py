"""C-Flat Turbo: Algorithm 1 line by line, its open points as in the table of readings of architecture.md."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from reference.space import Algorithm, Gradient, MovingStatistics, inner, norm, orthogonal, unit


class CFlatTurbo(Algorithm):
    """Algorithm 1."""

    def __init__(
        self,
        rho: Any,
        lam: float,
        beta: float,
        k: int,
        k_growth: float = 10.0,
        threshold: float = 1.0,
        decay: float = 0.9,
        rho_fd: float | None = None,
        trigger: bool = True,
        schedule: bool = True,
        reading: str = "printed",
        cache_decay: float = 0.0,
    ) -> None:
        super().__init__(rho)
        self.lam, self.beta, self.rho_fd = lam, beta, rho_fd
        self.k_0, self.c, self.schedule = k, k_growth, schedule
        self.m, self.delta, self.trigger = threshold, decay, trigger
        self.reading, self.ema = reading, cache_decay
        self.start_task(0, None)

    def start_task(self, index: int, num_tasks: int | None) -> None:
        super().start_task(index, num_tasks)
        self.k = self.k_0
        if self.schedule and num_tasks is not None:
            self.k = max(1, math.floor(self.k_0 + self.c * index / num_tasks))
        is_rooted = self.reading == "calibrated"
        self.s_statistics = MovingStatistics(self.delta, root=is_rooted)
        self.f_statistics = MovingStatistics(self.delta, root=is_rooted)
        self.g_vs: Tensor | None = None
        self.g_vf: Tensor | None = None
        self.s_refreshed = self.f_refreshed = 0

    def direction(self, theta: Tensor, gradient: Gradient) -> Tensor:
        rho = self.rho
        rho_fd = rho if self.rho_fd is None else self.rho_fd

        g = gradient(theta)
        if self.trigger and not self.s_statistics.is_large(norm(g) ** 2, self.m):
            return g

        if self.g_vs is None or self.is_due(self.s_refreshed):
            g_s = gradient(theta + rho * unit(g))
            g_vs = orthogonal(g_s, g)
            self.a_s = inner(g_s, g) / norm(g) ** 2
            self.c_s = norm(g_vs) / norm(g)
            self.g_vs = self.averaged(self.g_vs, g_vs)
            self.s_refreshed = self.j
        elif self.reading == "calibrated":
            g_s = self.a_s * g + self.c_s * norm(g) * unit(self.g_vs)
        else:
            g_s = g + self.beta * norm(g) * unit(self.g_vs)

        theta_p = theta + rho * unit(g_s - g)
        g_0 = gradient(theta_p)
        if self.trigger and not self.f_statistics.is_large(norm(g_0) ** 2, self.m):
            return g_s

        if self.g_vf is None or self.is_due(self.f_refreshed):
            g_1 = gradient(theta_p + rho_fd * unit(g_0))
            g_f = rho / rho_fd * (g_1 - g_0)
            g_vf = orthogonal(g_f, g_0)
            self.a_f = inner(g_f, g_0) / norm(g_0) ** 2
            self.c_f = norm(g_vf) / norm(g_0)
            self.g_vf = self.averaged(self.g_vf, g_vf)
            self.f_refreshed = self.j
        elif self.reading == "calibrated":
            g_f = self.a_f * g_0 + self.c_f * norm(g_0) * unit(self.g_vf)
        elif self.reading == "consistent":  # the simulated g_1, minus g_0
            g_f = self.beta * norm(g_0) * unit(self.g_vf)
        else:
            g_f = g_0 + self.beta * norm(g_0) * unit(self.g_vf)
        return g_s + self.lam * g_f

    def is_due(self, refreshed: int) -> bool:
        """Whether a filled cache must be computed anew in this iteration."""
        return self.j - refreshed >= self.k if self.reading == "calibrated" else self.j % self.k == 0

    def averaged(self, past: Tensor | None, new: Tensor) -> Tensor:
        """The EMA state of the appendix, which begins with its first value."""
        return new if past is None else self.ema * past + (1 - self.ema) * new
