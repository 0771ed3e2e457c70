"""The measured rule: a cached direction is used only as far as it has been seen to predict.

With d = (g_s - g) + lam * (rho / rho') * (g_1 - g_0), the increment of exact C-Flat over the gradient:

    refresh      d is computed and set against what was predicted for it; out of sample, as u is from earlier batches:
                 a <- mean of <d, g> / |g|^2,    c <- mean of <v, u> / |g|    with v = d - <d, g> / |g|^2 g.
                 Then u <- unit(keep * u + unit(v)), and the step descends along g + d.
    in between   descend along g + d^, d^ = a g + max(c, 0) |g| u: one evaluation, no proxy model.

Where `TurboRules.power` is below 1, d^ grows with |g|^power instead of |g|: a and c are means of the ratios above times
|g|^(1 - power). Where `TurboRules.make_up` is m > 1, a refresh after n steps descends along g + d + (min(n, m) - 1)
(d - d^): what predictions have missed is made up, as far as this batch tells.

All gradients of a step are taken around the weights where `CFlatTurbo.ahead` more steps along the momentum would lead:
theta below is that point, and e says how well C-Flat is predicted there. 0 stays where the weights are.

Where `TurboRules.is_bounded`, a step is shortened if SGD would overshoot with it: each refresh measures the curvature
h = |g_s - g| / rho along its gradient, unless rho is lost in the rounding of the weights. In between h is predicted
like d, and a step is multiplied by H / h where h is above the H of `bearable_curvature`.

A full refresh takes four evaluations. Where `TurboRules.full_every` is above 1, most refreshes are half ones of two:
they compute g_s and take d = (1 + phi) (g_s - g), phi being the mean of |d| / |g_s - g| - 1 over the full ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cflat.optim._ahead import bearable_curvature, look_ahead, steps_within_reach
from cflat.optim._passes import Direction
from cflat.optim._surrogate import Products, surrogate_errors
from cflat.optim._vectors import EPS, Vector, dot, read
from cflat.optim._weights import Weights

if TYPE_CHECKING:
    from cflat.optim.c_flat_turbo import CFlatTurbo

RATE = 0.1
"""Least weight of the newest observation in a mean."""
ALONG, ACROSS = (-0.9, 2.0), (-1.0, 1.0)
"""Bounds of single observations of a and c: one batch must not decide."""
HALF, FULL = 1, 3
"""Evaluations that a refresh costs beyond the gradient itself."""
TOLERANCE, THRIFT = 0.5, 0.25
"""Below this error a budget is not spent whole, but down to this share of it."""


@dataclass
class _Mean:
    """A running mean that forgets slowly."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(1 / self.count, RATE) * (value - self.value)


class Measured:
    """Coefficients, cached direction and refreshes of one task; settings, memory and counters are the optimizer's."""

    def __init__(self, turbo: CFlatTurbo) -> None:
        self.turbo = turbo
        self.memory = turbo.memory("u")
        self.along, self.across, self.phi, self.error, self.curvature = (_Mean() for _ in _MEANS)
        self.refreshes = 0
        self.refreshed_at = self.fully_refreshed_at = 0
        self.credit = 0.0
        self.size = 0.0  # |theta| when the task began

    def direction(self, weights: Weights) -> Direction:
        """Return g + d, or its prediction."""
        turbo, rho = self.turbo, self.turbo.rho
        lam = turbo.lam * turbo.flatness_ratio

        steps = steps_within_reach(weights, turbo.base, turbo.ahead) if turbo.looks_ahead else 0.0
        self._begin(weights, steps)
        g = yield "g"
        if not self._is_due():
            return self._predict(g, weights.params)

        is_full = self._is_full()
        if self.refreshes == 0 and self._is_bounded:
            self.size = weights.values().agreed_norm
        self._begin(weights, steps)
        weights.walk(g, rho)  # theta + eps_0
        g_s = yield "g_s"
        increment = g_s.minus(g)
        if not is_full:
            g_s.add_(increment, self.phi.value)
            self._learn(weights.params, g, increment.scale_(1 + self.phi.value), g_s)
            self._pay(HALF)
            turbo.count("sharpness", "refreshed", g=g.norm)
            turbo.count("flatness", "reused")
            return g_s

        length = increment.agreed_norm
        turbo.count("sharpness", "refreshed", g=g.norm, increment=increment.norm)
        self._begin(weights, steps)
        weights.walk(increment, rho)  # theta_p = theta + eps_1
        if turbo.refreshes_always:
            del g
        del increment
        g_0 = yield "g_0"
        weights.walk(g_0, turbo.finite_step)  # theta_p + rho' * g_0 / |g_0|
        turbo.count("flatness", "refreshed", g_0=g_0.norm)
        g_s.add_(g_0, -lam)
        del g_0
        g_1 = yield "g_1"
        g_s.add_(g_1, lam)
        del g_1
        if not turbo.refreshes_always:
            d = g_s.minus(g)
            self._learn(weights.params, g, d, g_s, sharpness=length)
        self._pay(FULL)
        return g_s

    def _begin(self, weights: Weights, steps: float) -> None:
        """Go to theta, or some steps ahead of it."""
        if steps > 0:
            look_ahead(weights, self.turbo.base, steps)
        elif weights.params:
            weights.back()

    def cache_age(self) -> dict[str, int]:
        """Return the steps since the last refresh, and since the last full one."""
        step = self.turbo.task_step
        ages = {"sharpness": step - self.refreshed_at, "flatness": step - self.fully_refreshed_at}
        return ages if self.memory else {}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold besides the memory."""
        means = {name: dict(vars(getattr(self, name))) for name in _MEANS}  # asked every step, and asdict is slow
        counts = {name: getattr(self, name) for name in _COUNTS}
        return {**means, **counts}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        for name, value in state.items():
            setattr(self, name, value if name in _COUNTS else _Mean(**value))

    # -- when -------------------------------------------------------------------------------------------------------

    def _is_due(self) -> bool:
        """Whether this step refreshes: by interval, or when the budget has saved up for it."""
        turbo = self.turbo
        if self.refreshes == 0:
            return True
        if turbo.evaluations is None:
            return turbo.task_step + 1 - self.refreshed_at >= turbo.interval
        need = 1.0 if self.error.count == 0 else min(max(self.error.value / TOLERANCE, THRIFT), 1.0)
        self.credit += (turbo.evaluations - 1) * need
        return self.credit > (FULL if self._is_full() else HALF) - 1e-9  # 0.3 ten times is 2.99...

    def _is_full(self) -> bool:
        """Whether the next refresh computes the flatness term, too."""
        turbo = self.turbo
        return (
            self.refreshes % turbo.rules.full_every == 0
            or turbo.refreshes_always
            or (turbo.evaluations is not None and self.credit > FULL - 1e-9)
        )

    def _pay(self, price: int) -> None:
        step = self.turbo.task_step + 1
        self.credit = 0.0 if self.refreshes == 0 else self.credit - price  # the first of a task is free
        self.refreshes += 1
        self.refreshed_at = step
        if price == FULL:
            self.fully_refreshed_at = step

    # -- what -------------------------------------------------------------------------------------------------------

    @property
    def _is_useless(self) -> bool:
        """Whether predictions are left out: they were farther from C-Flat than the gradient alone."""
        return self.turbo.rules.is_guarded and self.error.value >= 1

    def _coefficients(self, length: float) -> tuple[float, float]:
        """Return a and c for a gradient of this length."""
        scale = length ** (self.turbo.rules.power - 1) if length > 0 else 0.0
        return _clip(self.along.value * scale, ALONG), _clip(self.across.value * scale, (0.0, ACROSS[1]))

    @property
    def _is_bounded(self) -> bool:
        """Whether steps that would overshoot are shortened; those of exact C-Flat are not."""
        return self.turbo.rules.is_bounded and not self.turbo.is_exact

    def _bearable_share(self, length: float) -> float:
        """Return how much of a step with a gradient of this length SGD can take and stay stable; noted if not all."""
        turbo = self.turbo
        if not self._is_bounded:
            return 1.0
        curvature: float = self.curvature.value * length**turbo.rules.power
        limit = bearable_curvature(turbo.base, turbo.ahead)
        if curvature <= limit:
            return 1.0
        share = limit / curvature
        turbo.note(share=share)
        return share

    def _predict(self, g: Vector, params: Sequence[Tensor]) -> Vector:
        """Return (1 + a) g + c |g| u in the memory of g."""
        turbo, share = self.turbo, self._bearable_share(g.norm)
        if self._is_useless:
            turbo.count("sharpness", "skipped", g=g.norm)
            turbo.count("flatness", "skipped")
            return g if share == 1 else g.scale_(share)
        turbo.count("sharpness", "reused", g=g.norm)
        turbo.count("flatness", "reused")
        a, c = self._coefficients(g.norm)
        length = c * g.norm * share
        u = self.memory.recall(params, like=g) if length else None
        g.scale_((1 + a) * share)
        return g if u is None else g.add_(u, length / (u.norm + EPS))

    def _learn(self, params: Sequence[Tensor], g: Vector, d: Vector, direction: Vector, sharpness: float = 0.0) -> None:
        """Set d against its prediction, take it into the means, and keep its direction, in the memory of d.

        What the predictions have missed is added to ``direction``, which is shortened if it would go too far.
        """
        u = self.memory.recall(params, like=g) if self.memory else None
        products = [dot(d, g)] if u is None else [dot(d, g), dot(d, u), dot(g, u)]
        length, *inner = read(d, *products, agreed=True)
        if length == 0 or g.agreed_norm == 0:
            return  # nothing was perturbed: a radius or a gradient of zero
        unit = 1.0 if u is None else u.agreed_norm + EPS
        found = Products(g.agreed_norm, length, inner[0], *(value / unit for value in inner[1:]))
        if self.refreshes > 0:
            a, c = self._coefficients(found.g)
            self._make_up(direction, g, d, u, (a, c * found.g / unit))
            error, across = surrogate_errors(found, a, 0.0 if u is None else c)
            self.error.add(error)
            self.turbo.note(error=error, error_orthogonal=across)
        scale = found.g ** (1 - self.turbo.rules.power)
        self.along.add(_clip(found.along, ALONG) * scale)
        if u is not None:
            self.across.add(_clip(found.vu / found.g, ACROSS) * scale)
        increment = sharpness or length / (1 + self.phi.value)  # |g_s - g|
        if self._is_bounded and self.turbo.rho > _resolution(g) * self.size:
            self.curvature.add(increment / self.turbo.rho / found.g**self.turbo.rules.power)
        if sharpness > 0:
            self.phi.add(length / sharpness - 1)
        share = self._bearable_share(found.g)
        if share < 1:
            direction.scale_(share)
        self._keep(params, d.remove_along_(g, inner[0]), u, found)

    def _make_up(self, direction: Vector, g: Vector, d: Vector, u: Vector | None, used: tuple[float, float]) -> None:
        """Add (min(n, m) - 1) (d - d^), n steps after the last refresh; ``used`` are the coefficients of d^ (g, u)."""
        owed = min(self.turbo.task_step + 1 - self.refreshed_at, self.turbo.rules.make_up) - 1
        if owed == 0:
            return
        direction.add_(d, owed)
        if self._is_useless:
            return  # nothing was predicted
        direction.add_(g, -owed * used[0])
        if u is not None:
            direction.add_(u, -owed * used[1])

    def _keep(self, params: Sequence[Tensor], v: Vector, u: Vector | None, found: Products) -> None:
        """Cache unit(keep * u + unit(v)), in the memory of v."""
        if found.v_squared > 0.1 * found.d**2:  # Pythagoras saves a synchronisation, unless it cancels
            v.know_norm(math.sqrt(found.v_squared))
        length, keep = v.agreed_norm, self.turbo.rules.keep
        if length <= EPS * found.d:
            return  # d is parallel to g
        v.scale_(1 / length)
        if u is not None and keep > 0:
            cosine = _clip(found.vu / length, (-1.0, 1.0))
            v.add_(u, keep / (u.agreed_norm + EPS)).scale_(1 / math.sqrt(1 + keep**2 + 2 * keep * cosine))
        v.know_norm(1.0)
        self.memory.store(params, v)


_MEANS = ("along", "across", "phi", "error", "curvature")
_COUNTS = ("refreshes", "refreshed_at", "fully_refreshed_at", "credit", "size")


def _resolution(g: Vector) -> float:
    """Return how far, relative to their length, weights must move for a finite difference: sqrt(eps), as for any."""
    return math.sqrt(max((torch.finfo(tensor.dtype).eps for tensor in g.tensors), default=0.0))


def _clip(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])
