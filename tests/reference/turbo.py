"""C-Flat Turbo: Algorithm 1, with its open points as in the TurboRules table of architecture.md, and the measured rule
of turbo.md with what we have added to it (docs/deviations.md)."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from reference.space import Algorithm, Gradient, MovingStatistics, inner, norm, orthogonal, unit


def CFlatTurbo(rules: str = "adaptive", **settings: Any) -> Algorithm:
    """The algorithm that some rules name."""
    if rules in ("paper", "steady"):
        return Printed(rules=rules, **settings)
    for unused in ("beta", "threshold", "decay", "trigger"):
        settings.pop(unused, None)
    return MeasuredTurbo(rules=rules, **settings)


class Printed(Algorithm):
    """Algorithm 1 line by line."""

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
        rules: str = "paper",
    ) -> None:
        super().__init__(rho)
        self.lam, self.beta, self.rho_fd = lam, beta, rho_fd
        self.k_0, self.c, self.schedule = k, k_growth, schedule
        self.m, self.delta, self.trigger = threshold, decay, trigger
        self.is_steady = rules == "steady"
        self.start_task(0, None)

    def start_task(self, index: int, num_tasks: int | None) -> None:
        super().start_task(index, num_tasks)
        self.k = self.k_0
        if self.schedule and num_tasks is not None:
            self.k = max(1, math.floor(self.k_0 + self.c * index / num_tasks))
        self.s_statistics = MovingStatistics(self.delta, root=self.is_steady)
        self.f_statistics = MovingStatistics(self.delta, root=self.is_steady)
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
            self.g_vs = orthogonal(g_s, g)
            self.a_s = inner(g_s, g) / norm(g) ** 2
            self.c_s = norm(self.g_vs) / norm(g)
            self.s_refreshed = self.j
        elif self.is_steady:
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
            self.g_vf = orthogonal(g_f, g_0)
            self.a_f = inner(g_f, g_0) / norm(g_0) ** 2
            self.c_f = norm(self.g_vf) / norm(g_0)
            self.f_refreshed = self.j
        elif self.is_steady:
            g_f = self.a_f * g_0 + self.c_f * norm(g_0) * unit(self.g_vf)
        else:
            g_f = g_0 + self.beta * norm(g_0) * unit(self.g_vf)
        return g_s + self.lam * g_f

    def is_due(self, refreshed: int) -> bool:
        """Whether a filled cache must be computed anew in this iteration."""
        return self.j - refreshed >= self.k if self.is_steady else self.j % self.k == 0


class MeasuredTurbo(Algorithm):
    """turbo.md 2; "adaptive" averages directions, computes the flatness term on every tenth refresh, has a budget,
    leaves the surrogate out while it is farther from C-Flat than nothing at all, and looks ahead: with momentum the
    last move of the weights is what the next would be without a gradient; it is made five times more, at today's rate.
    Its steps are shortened where the curvature that was measured makes SGD overshoot.
    """

    def __init__(
        self,
        rho: Any,
        lam: float,
        k: int | None = None,
        k_growth: float = 10.0,
        rho_fd: float | None = None,
        schedule: bool = True,
        evaluations: float | None = None,
        ahead: float | None = None,
        rules: str = "measured",
    ) -> None:
        super().__init__(rho)
        self.lam, self.rho_fd = lam, rho_fd
        self.is_adaptive = rules == "adaptive"
        self.ahead = (5.0 if self.is_adaptive else 0.0) if ahead is None else ahead
        self.before: tuple[Tensor, float] | None = None
        self.shares: list[float] = []
        self.k_0, self.c_0, self.schedule = 5 if k is None else k, k_growth, schedule
        self.budget = evaluations
        if self.is_adaptive and evaluations is None and k is None and schedule:
            self.budget = 1.38
        self.start_task(0, None)

    def start_task(self, index: int, num_tasks: int | None) -> None:
        super().start_task(index, num_tasks)
        self.k = self.k_0
        if self.schedule and num_tasks is not None:
            self.k = math.floor(self.k_0 + self.c_0 * index / num_tasks)
        self.u: Tensor | None = None
        self.a: list[float] = []
        self.c: list[float] = []
        self.phi: list[float] = []
        self.e: list[float] = []
        self.h: list[float] = []
        self.n = 0
        self.refreshed = 0
        self.saved = 0.0

    def next_direction(self, theta: Tensor, gradient: Gradient, lr: float) -> Tensor:
        self.move = 0 * theta if self.before is None else (theta - self.before[0]) * (lr / self.before[1])
        self.before = theta.clone(), lr
        return super().next_direction(theta, gradient, lr)

    def direction(self, theta: Tensor, gradient: Gradient) -> Tensor:
        rho = self.rho
        rho_fd = rho if self.rho_fd is None else self.rho_fd
        if not (self.budget is None and self.k == 1):
            reach = 0.1 * norm(theta) / norm(self.move) if norm(self.move) > 0 else 0.0
            theta = theta + min(self.ahead, reach) * self.move
        g = gradient(theta)
        power = 0.5 if self.is_adaptive else 1.0
        scale = norm(g) ** (power - 1)
        a = min(max(running_mean(self.a) * scale, -0.9), 2.0)
        c = min(max(running_mean(self.c) * scale, 0.0), 1.0)
        surrogate = a * g if self.u is None else a * g + c * norm(g) * self.u
        is_useless = self.is_adaptive and running_mean(self.e) >= 1

        if self.n > 0:
            if self.budget is None:
                is_due = self.j - self.refreshed >= self.k
            else:
                need = min(max(running_mean(self.e) / 0.5, 0.25), 1.0) if self.e else 1.0
                self.saved += (self.budget - 1) * need
                is_due = self.saved > (3 if self.is_full() else 1) - 1e-9
            if not is_due:
                return self.bounded(g if is_useless else g + surrogate, g)

        is_full = self.is_full()
        g_s = gradient(theta + rho * unit(g))
        if is_full:
            theta_p = theta + rho * unit(g_s - g)
            g_0 = gradient(theta_p)
            g_1 = gradient(theta_p + rho_fd * unit(g_0))
            d = (g_s - g) + self.lam * rho / rho_fd * (g_1 - g_0)
        else:
            d = (1 + running_mean(self.phi)) * (g_s - g)

        missed = 0.0
        if self.n > 0:
            self.e.append(norm(surrogate - d) / norm(d))
            steps = min(self.j - self.refreshed, 2 if self.is_adaptive else 1)
            missed = (steps - 1) * (d if is_useless else d - surrogate)
        v = orthogonal(d, g)
        self.a.append(min(max(inner(d, g) / norm(g) ** 2, -0.9), 2.0) / scale)
        if self.u is not None:
            self.c.append(min(max(inner(v, self.u) / norm(g), -1.0), 1.0) / scale)
        if is_full:
            self.phi.append(norm(d) / norm(g_s - g) - 1)
        self.h.append(norm(g_s - g) / rho / norm(g) ** 0.5)
        keep = 0.8 if self.is_adaptive and self.u is not None else 0.0
        self.u = unit(unit(v) + keep * self.u) if keep else unit(v)
        self.saved = 0.0 if self.n == 0 else self.saved - (3 if is_full else 1)
        self.n += 1
        self.refreshed = self.j
        return self.bounded(g + d + missed, g)

    def bounded(self, direction: Tensor, g: Tensor) -> Tensor:
        """The direction, shortened if curvature and rate make SGD unstable, whose momentum is b and whose gradients are
        taken some steps ahead: rate * curvature at most 2 (1 + b) / (1 + 2 ahead)."""
        is_exact = self.k == 1 if self.budget is None else self.budget >= 4
        if not self.is_adaptive or is_exact or "momentum" not in self.groups[0]:
            return direction
        curvature = running_mean(self.h) * norm(g) ** 0.5
        share = 1.0
        for group in self.groups:
            b, rate = group["momentum"], group["lr"] * (1 - group["dampening"])
            ahead = self.ahead + b * group["nesterov"]
            share = min(share, 2 * (1 + b) / (1 + 2 * ahead) / (rate * curvature))
        self.shares.append(share)
        return share * direction

    def is_full(self) -> bool:
        """Whether the next refresh computes the flatness term, too."""
        is_rich = self.budget is not None and self.saved > 3 - 1e-9
        return not self.is_adaptive or self.n % 10 == 0 or is_rich or (self.budget is None and self.k == 1)


def running_mean(values: list[float]) -> float:
    """The mean with weights max(1/n, 0.1) for the newest value; 0 of nothing."""
    mean = 0.0
    for n, value in enumerate(values, start=1):
        mean += max(1 / n, 0.1) * (value - mean)
    return mean
