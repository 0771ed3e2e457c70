"""C-Flat Forecast, ours: forecast on most steps what C-Flat would add to the gradient, and check it on the others.

With d = (g_s - g) + lam * (rho / rho') * (g_1 - g_0), the increment of exact C-Flat over the gradient:

    forecast     descend along g + d^, d^ = a g + max(c, 0) |g| u: one evaluation.
    refresh      compute d, descend along g + d, and set d against its forecast; out of sample, as u is from an earlier
                 batch: a <- mean of <d, g> / |g|^2,  c <- mean of <v, u> / |g|  with v = d - <d, g> / |g|^2 g.
                 Then u <- unit(v).

The refresh that begins a task is exact: four evaluations. The others take two, compute g_s alone and put
d = (1 + phi) (g_s - g), phi being the mean of |d| / |g_s - g| - 1 over the exact ones. A budget of evaluations says
when to refresh, and makes refreshes exact if it can afford that. While the mean of e = |d^ - d| / |d| is 1 or more,
forecasts are left out. What each part is worth, and what was left out: docs/results/surrogate.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cflat.optim.engine import (
    EPS,
    Direction,
    FlatnessAware,
    NotNegative,
    Positive,
    Products,
    Radius,
    Range,
    StepOptions,
    Vector,
    Weights,
    dot,
    read,
    register_optimizer,
    surrogate_errors,
)

__all__ = ["CFlatForecast"]

HALF, FULL = 1, 3
"""Evaluations that a refresh costs beyond the gradient itself."""
RATE = 0.1
"""Least weight of the newest observation in a mean."""
ALONG, ACROSS, PHI = (-0.9, 2.0), (-1.0, 1.0), (-2.0, 10.0)
"""Bounds of single observations of a, c and phi / lam: one batch must not decide, and rounding even less."""


@register_optimizer(
    "c_flat_forecast",
    title="C-Flat Forecast",
    summary="ours: C-Flat's increment forecast, checked out of sample, within an evaluation budget",
    evaluations="1.3, or as set",
    peak_buffers=4,
    persistent_buffers=1,
    paper="none: an approximation of C-Flat by this library",
)
class CFlatForecast(FlatnessAware):
    """Descend along C-Flat's direction, computed on some steps and forecast on the others.

    Most steps take one evaluation, some two, a few four. One gradient-sized buffer is kept between steps, three more
    are held during extra evaluations. ``telemetry.surrogate`` says how far the forecasts were from C-Flat.

    Args:
        base: Any torch optimizer; its groups and schedules stay in charge of the update.
        model: The module whose buffers extra evaluations must leave alone; optional.
        rho: Radius of the neighbourhood; above 0, or a schedule.
        rho_fd: Step of the finite difference in g_f (rho'); None means ``rho``.
        lam: Weight of the flatness term; at least 0.
        evaluations: Budget in evaluations per step, above 1 and at most 4, which is C-Flat; the exact step that begins
            a task comes on top.
        options: How steps are taken; see `StepOptions`.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> opt = CFlatForecast(torch.optim.SGD(model.parameters(), lr=0.1), model=model, rho=0.05, evaluations=1.2)
    """

    scalars = ("means", "counts", "credit", "refreshes", "refreshed_at", "fully_refreshed_at")

    def __init__(
        self,
        base: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: Radius = 0.05,
        rho_fd: Positive | None = None,
        lam: NotNegative = 0.2,
        evaluations: Annotated[float, Range(above=1, at_most=4)] = 1.3,
        options: StepOptions | None = None,
    ) -> None:
        super().__init__(base, model=model, rho=rho, lam=lam, rho_fd=rho_fd, options=options)
        self.evaluations = evaluations
        self._begin()

    def _begin(self) -> None:
        self.means = {"a": 0.0, "c": 0.0, "phi": 0.0, "e": 0.0}
        self.counts = dict.fromkeys(self.means, 0)
        self.credit = 0.0  # evaluations that are saved up for the next refresh
        self.refreshes = self.refreshed_at = self.fully_refreshed_at = 0

    def start_task(self, index: int, num_tasks: int | None = None) -> None:
        """Begin a task: forget direction, coefficients and credit."""
        super().start_task(index, num_tasks)
        self._begin()

    def direction(self, weights: Weights) -> Direction:
        """Return g + d, or its forecast."""
        g = yield "g"
        price = self.price()
        if price == 0:
            self._pay(0)
            return self._forecast(weights.params, g)

        g_s = yield from self.sharp_gradient(weights, g)
        self.count("sharpness", "refreshed", g=g.norm)
        increment, sharpness = g_s.minus(g), None
        # The flatness term is about a fifth of d and mostly along the rest: without it, three times as many steps can
        # be refreshed within the same budget.
        if price == HALF:
            self.count("flatness", "reused")
            g_s.add_(increment, self.means["phi"])
            d = increment.scale_(1 + self.means["phi"])
        else:
            # Read before the increment is handed over, which frees it.
            sharpness = increment.agreed_norm
            proxy = self.proxy_gradient(weights, increment)
            del increment
            yield from self.add_flatness(weights, g_s, (yield from proxy))
            d = g_s.minus(g)
        self._learn(weights.params, g, d, sharpness)
        g_s.is_finite = True  # as g and d are, which were read
        self._pay(price)
        return g_s

    def price(self) -> int:
        """Return the evaluations beyond the gradient that the next step spends: 0, HALF or FULL."""
        if self.refreshes == 0:
            return FULL
        credit = self.credit + self.evaluations - 1 + 1e-9  # 0.3 ten times is 2.99...
        return FULL if credit >= FULL else HALF if credit >= HALF else 0

    def _pay(self, price: int) -> None:
        """Book the step: a refresh, if it had a price; the first of a task is free."""
        step = self.task_step + 1
        self.credit = 0.0 if self.refreshes == 0 else self.credit + self.evaluations - 1 - price
        self.refreshes += price > 0
        self.refreshed_at = step if price > 0 else self.refreshed_at
        self.fully_refreshed_at = step if price == FULL else self.fully_refreshed_at

    @property
    def coefficients(self) -> tuple[float, float]:
        """The a and c of a forecast."""
        return self.means["a"], max(self.means["c"], 0.0)

    def _forecast(self, params: Sequence[Tensor], g: Vector) -> Vector:
        """Return (1 + a) g + c |g| u in the memory of g, or g while forecasts are farther from C-Flat than that."""
        outcome: Literal["skipped", "reused"] = "skipped" if self.means["e"] >= 1 else "reused"
        self.count("sharpness", outcome, g=g.norm)
        self.count("flatness", outcome)
        if outcome == "skipped":
            return g
        a, c = self.coefficients
        u = self.memory("u").recall(params, like=g) if c else None
        across = c * g.norm
        g.scale_(1 + a)
        return g if u is None else g.add_(u, across / (u.norm + EPS))

    def _learn(self, params: Sequence[Tensor], g: Vector, d: Vector, sharpness: float | None) -> None:
        """Set d against its forecast, take it into the means, and keep its direction, in the memory of d.

        ``sharpness`` is |g_s - g| of an exact refresh.
        """
        memory = self.memory("u")
        u = memory.recall(params, like=g) if memory else None
        products = [dot(d, g)] if u is None else [dot(d, g), dot(d, u), dot(g, u)]
        norm, *inner = read(d, *products, agreed=True)
        if norm <= _resolution(g) * g.agreed_norm:
            return  # nothing was perturbed, or d is rounding
        unit = 1.0 if u is None else u.agreed_norm + EPS
        found = Products(g.agreed_norm, norm, inner[0], *(value / unit for value in inner[1:]))
        # The first refresh of a task has no forecast to be compared with.
        if self.refreshes > 0:
            a, c = self.coefficients
            error, across = surrogate_errors(found, a, 0.0 if u is None else c)
            self._observe("e", error)
            self.note(error=error, error_orthogonal=across)
        self._observe("a", found.along, *ALONG)
        if u is not None:
            self._observe("c", found.vu / found.g, *ACROSS)
        if sharpness:
            lam = max(group.get("lam", self.lam) for group in self.param_groups)
            # |d| / |g_s - g| - 1 cannot lie below -1.
            self._observe("phi", norm / sharpness - 1, max(PHI[0] * lam, -1.0), PHI[1] * lam)
        self._keep(params, d.remove_along_(g, inner[0]), found)

    def _observe(self, name: str, value: float, low: float = 0.0, high: float = math.inf) -> None:
        """Take an observation within bounds into a mean that forgets slowly."""
        mean, count = self.means[name], self.counts[name] + 1
        # A plain mean of the first ten, in which the initial 0 has no weight.
        change = max(1 / count, RATE) * (min(max(value, low), high) - mean)
        # New dicts: the state to which a rollback returns holds the old ones.
        self.means, self.counts = {**self.means, name: mean + change}, {**self.counts, name: count}

    def _keep(self, params: Sequence[Tensor], v: Vector, found: Products) -> None:
        """Cache unit(v), in the memory of v, unless d is parallel to g."""
        if found.v**2 > 0.1 * found.d**2:  # Pythagoras saves a synchronisation, unless it cancels
            v.know_norm(found.v)
        norm = v.agreed_norm
        if norm > _resolution(v) * found.d:
            v.scale_(1 / norm).know_norm(1.0)
            self.memory("u").store(params, v)

    def cache_age(self) -> dict[str, int]:
        """Return the steps since the last refresh, and since the last exact one."""
        ages = {"sharpness": self.refreshed_at, "flatness": self.fully_refreshed_at}
        return {name: self.task_step - at for name, at in ages.items()} if self.memory("u") else {}


def _resolution(vector: Vector) -> float:
    """Return the rounding of its coarsest tensor, relative to its norm."""
    return max(torch.finfo(tensor.dtype).eps for tensor in vector.tensors)
