"""C-Flat Forecast: lists of observations where the code has running means, vectors where it has inner products."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from reference.space import Algorithm, Gradient, inner, norm, orthogonal, unit


class CFlatForecast(Algorithm):
    """d^ = a g + c |g| u between refreshes, of which the first of a task has the flatness term."""

    def __init__(self, rho: Any, lam: float, evaluations: float, rho_fd: float | None = None) -> None:
        super().__init__(rho)
        self.lam, self.rho_fd, self.budget = lam, rho_fd, evaluations
        self.start_task(0, None)

    def start_task(self, index: int, num_tasks: int | None) -> None:
        super().start_task(index, num_tasks)
        self.u: Tensor | None = None
        self.a: list[float] = []
        self.c: list[float] = []
        self.phi: list[float] = []
        self.e: list[float] = []
        self.prices: list[int] = []
        """Extra evaluations of every step."""

    def direction(self, theta: Tensor, gradient: Gradient) -> Tensor:
        rho = self.rho
        rho_fd = rho if self.rho_fd is None else self.rho_fd
        g = gradient(theta)
        surrogate = running_mean(self.a) * g
        if self.u is not None:
            surrogate = surrogate + max(running_mean(self.c), 0.0) * norm(g) * self.u

        price = self.price()
        self.prices.append(price)
        if price == 0:
            return g if running_mean(self.e) >= 1 else g + surrogate

        g_s = gradient(theta + rho * unit(g))
        if price == 3:
            theta_p = theta + rho * unit(g_s - g)
            g_0 = gradient(theta_p)
            g_1 = gradient(theta_p + rho_fd * unit(g_0))
            d = (g_s - g) + self.lam * rho / rho_fd * (g_1 - g_0)
            self.phi.append(min(max(norm(d) / norm(g_s - g) - 1, max(-2 * self.lam, -1)), 10 * self.lam))
        else:
            d = (1 + running_mean(self.phi)) * (g_s - g)

        if len(self.prices) > 1:
            self.e.append(norm(surrogate - d) / norm(d))
        v = orthogonal(d, g)
        self.a.append(min(max(inner(d, g) / norm(g) ** 2, -0.9), 2.0))
        if self.u is not None:
            self.c.append(min(max(inner(v, self.u) / norm(g), -1.0), 1.0))
        self.u = unit(v)
        return g + d

    def price(self) -> int:
        """What this step may spend: the budget of all steps but the first, less what they have spent."""
        if not self.prices:
            return 3
        saved = len(self.prices) * (self.budget - 1) - sum(self.prices[1:]) + 1e-9
        return 3 if saved >= 3 else 1 if saved >= 1 else 0


def running_mean(values: list[float]) -> float:
    """The mean with weights max(1/n, 0.1) for the newest value; 0 of nothing."""
    mean = 0.0
    for n, value in enumerate(values, start=1):
        mean += max(1 / n, 0.1) * (value - mean)
    return mean
