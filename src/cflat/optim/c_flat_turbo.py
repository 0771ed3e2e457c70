"""C-Flat Turbo: Algorithm 1 of "A Faster Path to Continual Learning" (2026), line by line and in its notation.

What the paper leaves open is read as follows; docs/optimizers/c_flat_turbo.md has the reasons:

- Line 4 updates the statistics of |g|^2 with this step's value before line 5 tests it. Those of |g_0|^2 follow where
  g_0 exists, after line 15. A gradient of zero never triggers: it has no direction.
- Lines 5 and 16 test with >=, as printed (Eq. 9 has >), and sigma has the factor m of the appendix (``threshold``).
- Lines 6 and 17: a cache that is still empty is filled by the first step that needs it, whatever j mod k is.
- Lines 8 and 20 overwrite the cache. The appendix calls both caches EMA states in three places; ``cache_decay`` does
  that: g_v <- cache_decay * g_v + (1 - cache_decay) * (the new component), from the second refresh of a task on.
- Line 14: eps_1 = rho * unit(g_s - g) with this step's g_s, exact or simulated. If line 5 does not trigger there is
  none, so lines 14 to 25 are left out and the step takes one evaluation.
- Line 19: g_f = (rho / rho') * (g_1 - g_0), with rho' = rho unless ``rho_fd`` is given.
- Line 26: k_t = floor(k + k_growth * t / N) is set when task t (from 0) begins; without N it stays k.
- j, statistics and caches begin anew with every task. Norms and inner products are over all perturbed parameters.

``reading`` says what lines 10 and 22 put in, v being the cached component:

==============  ===========================  ====================================  ===============  ================
reading         g_s                          g_f                                   sigma            refresh
==============  ===========================  ====================================  ===============  ================
"printed"       g + beta |g| unit(v)         g_0 + beta |g_0| unit(v)              as printed       j mod k = 0
"consistent"    g + beta |g| unit(v)         beta |g_0| unit(v)                    as printed       j mod k = 0
"calibrated"    (1 + a) g + c |g| unit(v)    a_f g_0 + c_f |g_0| unit(v)           its square root  k steps old
==============  ===========================  ====================================  ===============  ================

"consistent" lets g_0 + beta |g_0| unit(v) stand for g_1, whose recomputation the text says it avoids: then Eq. 5 gives
this g_f. "calibrated" takes a and c from the last refresh, where they reproduce the exact terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from cflat.optim.engine import (
    EPS,
    Count,
    Direction,
    DirectionMemory,
    EmaTrigger,
    FlatnessAware,
    Fraction,
    NotNegative,
    Positive,
    Products,
    Radius,
    StepOptions,
    Vector,
    Weights,
    dot,
    read,
    register_optimizer,
    surrogate_errors,
)

__all__ = ["CFlatTurbo"]

Reading = Literal["printed", "consistent", "calibrated"]


@register_optimizer(
    "c_flat_turbo",
    title="C-Flat Turbo",
    summary="Algorithm 1 of the paper: C-Flat with cached components, scheduled and triggered",
    evaluations="1 to 4",
    peak_buffers=6,
    persistent_buffers=2,
    paper="A Faster Path to Continual Learning (2026)",
)
class CFlatTurbo(FlatnessAware):
    """Descend along g, g_s or g_s + lam * g_f, each computed exactly or simulated from a cached component.

    A step takes 1 to 4 evaluations: 1 if the gradient is not large, 2 or 3 if components are reused, 4 if all is exact.
    Two gradient-sized buffers are kept between steps.

    Args:
        base: Any torch optimizer; its groups and schedules stay in charge of the update.
        model: The module whose buffers extra evaluations must leave alone; optional.
        rho: Radius of the neighbourhood; above 0, or a schedule.
        rho_fd: Step of the finite difference in g_f (rho'); None means ``rho``.
        lam: Weight of the flatness term; at least 0.
        beta: Norm of a reused component relative to its reference gradient; at least 0. Not used by ``"calibrated"``.
        k: Steps from one refresh to the next in the first task; at least 1.
        k_growth: How much k grows over the whole stream (c of the appendix); at least 0.
        schedule: Whether k grows with the tasks.
        trigger: Whether terms are left out whose gradient is not large; False is the paper's ablation without it.
        threshold: How many dispersions above its mean |g|^2 must lie to trigger (m); at least 0.
        decay: Decay of the trigger's moving statistics (delta), in [0, 1).
        reading: ``"printed"``, ``"consistent"`` or ``"calibrated"``; see the top of this file.
        cache_decay: Weight of the past in the cached components, in [0, 1); 0 keeps the last ones.
        options: How steps are taken; see `StepOptions`.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> opt = CFlatTurbo(torch.optim.SGD(model.parameters(), lr=0.1), model=model, rho=0.05)
    >>> opt.start_task(3, num_tasks=10)
    >>> opt.interval
    8
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: Radius = 0.05,
        rho_fd: Positive | None = None,
        lam: NotNegative = 0.2,
        beta: NotNegative = 0.8,
        k: Count = 5,
        k_growth: NotNegative = 10.0,
        schedule: bool = True,
        trigger: bool = True,
        threshold: NotNegative = 1.0,
        decay: Fraction = 0.9,
        reading: Reading = "printed",
        cache_decay: Fraction = 0.0,
        options: StepOptions | None = None,
    ) -> None:
        super().__init__(base, model=model, rho=rho, lam=lam, rho_fd=rho_fd, options=options)
        self.beta, self.reading, self.cache_decay = beta, reading, cache_decay
        self.k, self.k_growth, self.schedule = k, k_growth, schedule
        self.trigger, self.threshold, self.decay = trigger, threshold, decay
        self.interval = k
        self._begin()

    def start_task(self, index: int, num_tasks: int | None = None) -> None:
        """Begin a task: reset caches and statistics, and set k_t = floor(k + k_growth * t / N)."""
        super().start_task(index, num_tasks)
        self._begin()
        self.interval = self.k
        if self.schedule and num_tasks is not None:
            self.interval += math.floor(self.k_growth * index / num_tasks + 1e-9)  # 1e-9: 7.0 may come out as 6.99...

    def direction(self, weights: Weights) -> Direction:
        """Return g, g_s or g_s + lam * g_f, each exact or simulated."""
        # With k = 1 nothing is reused, so nothing is cached either, and the step is C-Flat's bit for bit.
        sharp, flat, is_reusing = self._sharp, self._flat, self.interval > 1

        g = yield "g"  # line 2
        if not self._is_triggered(sharp, g):  # lines 4 and 5
            self.count("sharpness", "skipped", g=g.norm)
            self.count("flatness", "skipped")
            return g
        g_vs = self._reusable(sharp, weights.params, g)
        if g_vs is None:  # line 6
            g_s = yield from self.sharp_gradient(weights, g)  # line 7
            self.count("sharpness", "refreshed")
            increment = g_s.minus(g)
            if is_reusing:
                inner = self._compare(weights.params, increment, g)
                sharp.store(self.task_step + 1, weights.params, increment, g, inner)  # line 8
        else:
            self.count("sharpness", "reused", g=g.norm, g_vs=g_vs.norm)
            increment = sharp.simulate(g_vs, g)
            g_s = g.add_(increment)  # line 10
        proxy = self.proxy_gradient(weights, increment)
        # The generator `proxy` holds the increment alone from here on, and drops it before g_0 is computed.
        del g, g_vs, increment

        g_0 = yield from proxy  # lines 14 and 15
        if not self._is_triggered(flat, g_0):  # lines 4 and 16
            self.count("flatness", "skipped", g_0=g_0.norm)
            return g_s
        g_vf = self._reusable(flat, weights.params, g_0)
        if g_vf is not None:
            self.count("flatness", "reused", g_0=g_0.norm, g_vf=g_vf.norm)
            return g_s.add_(flat.simulate(g_vf, g_0), self.per_group("lam", weights))  # lines 22 and 24
        flatness = self.add_flatness(weights, g_s, g_0)
        # Only the cached component needs g_0 after this; without one it is not held during the last evaluation.
        if not is_reusing:
            del g_0
        g_1 = yield from flatness  # lines 18, 19 and 24
        if is_reusing:
            g_f = g_1.add_(g_0, -1.0).scale_(self.flatness_ratio)
            _, inner, _ = read(g_f, dot(g_f, g_0), g_s)  # with g_s, which is about to be checked
            flat.store(self.task_step + 1, weights.params, g_f, g_0, inner)  # line 20
        return g_s

    def _is_triggered(self, branch: _Branch, gradient: Vector) -> bool:
        return not self.trigger or branch.trigger.fires(gradient.agreed_norm**2, self.threshold)

    def _reusable(self, branch: _Branch, params: Sequence[Tensor], reference: Vector) -> Vector | None:
        """Return the cached component if this step may reuse it, or None if it must be refreshed."""
        j, k = self.task_step + 1, self.interval
        is_due = j - branch.refreshed_at >= k if self.reading == "calibrated" else j % k == 0
        return None if is_due or not branch.memory else branch.memory.recall(params, reference)

    def _compare(self, params: Sequence[Tensor], d: Vector, g: Vector) -> float:
        """Return <d, g>, and note how far the cached component was from d = g_s - g, at no evaluation."""
        cached = self._sharp.memory.recall(params, like=g) if self._sharp.memory else None
        if cached is None:
            return read(d, dot(d, g))[1]
        norm, inner, du, gu = read(d, dot(d, g), dot(d, cached), dot(g, cached))
        if norm > 0 and g.norm > 0:
            unit = cached.norm + EPS
            products = Products(g.norm, norm, inner, du / unit, gu / unit)
            error, across = surrogate_errors(products, *self._sharp.coefficients)
            self.note(error=error, error_orthogonal=across)
        return inner

    def _begin(self) -> None:
        is_printed = self.reading == "printed"
        self._sharp = _Branch(self, along=0.0, memory=self.memory("g_vs"))
        self._flat = _Branch(self, along=1.0 if is_printed else 0.0, memory=self.memory("g_vf"))

    def cache_age(self) -> dict[str, int]:
        """Return the steps since each branch was computed exactly, for those that are cached."""
        branches = {"sharpness": self._sharp, "flatness": self._flat}
        return {name: self.task_step - branch.refreshed_at for name, branch in branches.items() if branch.memory}

    def extra_state(self) -> dict[str, Any]:
        """Return interval, statistics, coefficients and ages."""
        return {"interval": self.interval, "sharp": self._sharp.state(), "flat": self._flat.state()}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take over interval, statistics, coefficients and ages."""
        self.interval = state["interval"]
        self._sharp.load(state["sharp"])
        self._flat.load(state["flat"])


class _Branch:
    """One regularization term with its trigger and its cached component.

    The term (g_s - g, or g_f) is simulated from its reference gradient (g, or g_0) and the cached component v of the
    term orthogonal to it, as a * reference + c * |reference| * unit(v).
    """

    def __init__(self, turbo: CFlatTurbo, *, along: float, memory: DirectionMemory) -> None:
        self.is_calibrated = turbo.reading == "calibrated"
        self.trigger = EmaTrigger(turbo.decay, is_rooted=self.is_calibrated)
        self.coefficients = (along, turbo.beta)
        self.cache_decay = turbo.cache_decay
        self.memory = memory
        self.refreshed_at = 0

    def store(self, j: int, params: Sequence[Tensor], term: Vector, reference: Vector, inner: float) -> None:
        """Cache the component of step j orthogonal to ``reference``, given the inner product, or its moving average."""
        along = inner / (reference.norm**2 + EPS**2)
        squared = term.norm**2 - along * inner
        component = term.clone().remove_along_(reference, inner)
        if squared > 0.1 * term.norm**2:  # Pythagoras saves a synchronisation, unless it cancels
            component.know_norm(math.sqrt(squared))
        # Of the new component, not of the average below: `cache_decay` changes the reused direction, not its norm.
        if self.is_calibrated:
            self.coefficients = (along, component.norm / (reference.norm + EPS))
        past = self.memory.recall(params, like=component) if self.cache_decay and self.memory else None
        if past is not None:
            component.scale_(1 - self.cache_decay).add_(past, self.cache_decay)
        self.memory.store(params, component)
        self.refreshed_at = j

    def simulate(self, component: Vector, reference: Vector) -> Vector:
        """Return the term from its cached component, in new memory."""
        along, across = self.coefficients
        term = component.scaled(across * reference.norm / (component.norm + EPS))
        return term.add_(reference, along) if along else term

    def state(self) -> dict[str, Any]:
        coefficients = list(self.coefficients)
        return {"trigger": self.trigger.state(), "coefficients": coefficients, "refreshed_at": self.refreshed_at}

    def load(self, state: dict[str, Any]) -> None:
        self.trigger.load(state["trigger"])
        along, across = state["coefficients"]
        self.coefficients, self.refreshed_at = (along, across), state["refreshed_at"]
