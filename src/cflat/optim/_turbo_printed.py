"""Algorithm 1 as printed, and `steady`, its calibrated reading: triggers decide, cached components stand in.

Each of the two terms of C-Flat has a branch with a trigger and a cache of its own; a reused step still evaluates the
gradient at the proxy model. `cflat.optim._turbo_measured` has the rule that needs neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cflat.optim._memory import DirectionMemory
from cflat.optim._passes import Direction
from cflat.optim._surrogate import Products, surrogate_errors
from cflat.optim._triggers import EmaTrigger
from cflat.optim._vectors import EPS, Vector, dot, read
from cflat.optim._weights import Weights

if TYPE_CHECKING:
    from cflat.optim.c_flat_turbo import CFlatTurbo


class Printed:
    """The two branches of Algorithm 1 in one task; settings, memories and counters are the optimizer's."""

    def __init__(self, turbo: CFlatTurbo) -> None:
        self.turbo = turbo
        self.sharp = _Branch(turbo, along=0.0, memory=turbo.memory("g_vs"))
        self.flat = _Branch(turbo, along=1.0, memory=turbo.memory("g_vf"))

    def direction(self, weights: Weights) -> Direction:
        """Return g, g_s or g_s + lam * g_f, each exact or simulated (Algorithm 1)."""
        turbo, rho, rho_fd = self.turbo, self.turbo.rho, self.turbo.finite_step
        j, k = turbo.task_step + 1, turbo.interval

        g = yield "g"
        if not self._fires(self.sharp, g):
            turbo.count("sharpness", "skipped", g=g.norm)
            turbo.count("flatness", "skipped")  # without g_s there is no proxy model to be flat around
            return g

        g_vs = self.sharp.reusable(j, k, weights.params, like=g)
        if g_vs is None:
            weights.jump(g, rho)  # theta + eps_0
            g_s = yield "g_s"
            increment = g_s.minus(g)
            inner = self._compare(g, increment, weights.params) if k > 1 else 0.0
            weights.jump(increment, rho)  # theta_p = theta + eps_1
            turbo.count("sharpness", "refreshed", increment=increment.norm)
            if k > 1:
                self.sharp.store(j, weights.params, increment, g, inner)
        else:
            turbo.count("sharpness", "reused", g=g.norm, g_vs=g_vs.norm)
            increment = self.sharp.simulate(g_vs, reference=g)
            weights.jump(increment, rho)
            g_s = g.add_(increment)
        del g, g_vs, increment

        g_0 = yield "g_0"
        if not self._fires(self.flat, g_0):
            turbo.count("flatness", "skipped", g_0=g_0.norm)
            return g_s

        g_vf = self.flat.reusable(j, k, weights.params, like=g_0)
        if g_vf is not None:
            turbo.count("flatness", "reused", g_0=g_0.norm, g_vf=g_vf.norm)
            return g_s.add_(self.flat.simulate(g_vf, reference=g_0), turbo.lam)

        turbo.count("flatness", "refreshed", g_0=g_0.norm)
        ratio = turbo.flatness_ratio
        weights.walk(g_0, rho_fd)  # theta_p + rho' * g_0 / |g_0|
        g_s.add_(g_0, -turbo.lam * ratio)
        self.flat.memory.clear()  # g_0 takes its place in memory until g_vf is known
        if k == 1:
            del g_0
        g_1 = yield "g_1"
        g_s.add_(g_1, turbo.lam * ratio)
        if k > 1:
            g_f = g_1.add_(g_0, -1.0).scale_(ratio)
            _, inner = read(g_f, dot(g_f, g_0))
            self.flat.store(j, weights.params, g_f, g_0, inner)
        return g_s

    def cache_age(self) -> dict[str, int]:
        """Return the steps since each branch was computed exactly, for those that are cached."""
        branches = {"sharpness": self.sharp, "flatness": self.flat}
        return {name: self.turbo.task_step - b.refreshed_at for name, b in branches.items() if b.memory}

    def state(self) -> dict[str, Any]:
        """Return statistics, coefficients and ages."""
        return {"sharp": self.sharp.state(), "flat": self.flat.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.sharp.load(state["sharp"])
        self.flat.load(state["flat"])

    def _compare(self, g: Vector, d: Vector, params: Sequence[Tensor]) -> float:
        """Return <d, g>, and note how far the cached component was from d = g_s - g, at no evaluation."""
        cached = self.sharp.memory.recall(params, like=g) if self.sharp.memory else None
        if cached is None:
            return read(d, dot(d, g))[1]
        length, inner, du, gu = read(d, dot(d, g), dot(d, cached), dot(g, cached))
        if length > 0 and g.norm > 0:
            unit = cached.norm + EPS
            products = Products(g.norm, length, inner, du / unit, gu / unit)
            error, across = surrogate_errors(products, *self.sharp.coefficients)
            self.turbo.note(error=error, error_orthogonal=across)
        return inner

    def _fires(self, branch: _Branch, gradient: Vector) -> bool:
        turbo = self.turbo
        return not turbo.trigger or branch.trigger.fires(gradient.agreed_norm**2, turbo.threshold)


class _Branch:
    """One regularization term with its trigger and its cached direction.

    The term v (g_s - g, or g_f) is simulated from its reference gradient (g, or g_0) and the cached component of v
    orthogonal to it, as v = a * reference + c * |reference| * unit(cache). Printed are a = ``along`` and c = ``beta``.
    """

    def __init__(self, turbo: CFlatTurbo, *, along: float, memory: DirectionMemory) -> None:
        self.rules = turbo.rules
        self.trigger = EmaTrigger(turbo.decay, is_rooted=turbo.rules.dispersion == "deviation")
        self.coefficients = (along, turbo.beta)
        self.memory = memory
        self.refreshed_at = 0

    def reusable(self, j: int, k: int, params: Sequence[Tensor], like: Vector) -> Vector | None:
        """Return the cached component if step j may reuse it, or None if it must be refreshed."""
        is_due = j % k == 0 if self.rules.refresh == "modulo" else j - self.refreshed_at >= k
        return None if is_due or not self.memory else self.memory.recall(params, like)

    def store(self, j: int, params: Sequence[Tensor], v: Vector, reference: Vector, inner: float) -> None:
        """Cache the component of ``v`` orthogonal to ``reference``, in the memory of ``v``."""
        parallel = inner / (reference.norm**2 + EPS**2)
        squared = v.norm**2 - parallel * inner  # Pythagoras saves a synchronisation, unless it cancels
        is_safe = squared > 0.1 * v.norm**2
        component = v.remove_along_(reference, inner)
        if is_safe:
            component.know_norm(math.sqrt(squared))
        if self.rules.surrogate == "calibrated":
            self.coefficients = (parallel, component.norm / (reference.norm + EPS))
        self.memory.store(params, component)
        self.refreshed_at = j

    def simulate(self, component: Vector, reference: Vector) -> Vector:
        """Return v from the cached component, in new memory."""
        along, beta = self.coefficients
        v = component.scaled(beta * reference.norm / (component.norm + EPS))
        return v.add_(reference, along) if along else v

    def state(self) -> dict[str, Any]:
        coefficients = list(self.coefficients)
        return {"trigger": self.trigger.state(), "coefficients": coefficients, "refreshed_at": self.refreshed_at}

    def load(self, state: dict[str, Any]) -> None:
        self.trigger.load(state["trigger"])
        along, beta = state["coefficients"]
        self.coefficients, self.refreshed_at = (along, beta), state["refreshed_at"]
