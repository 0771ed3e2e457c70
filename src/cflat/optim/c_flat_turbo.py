"""C-Flat Turbo: C-Flat with reused directions, growing intervals and an adaptive trigger.

Reference: "A Faster Path to Continual Learning" (2026), Algorithm 1; symbols follow its notation table. The points
that the paper leaves open are named in `TurboRules` and explained in docs/deviations.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from cflat._errors import check
from cflat._registry import suggest
from cflat.optim._base import SharpnessAware, StepOptions
from cflat.optim._catalog import register_optimizer
from cflat.optim._memory import DirectionMemory
from cflat.optim._passes import Direction
from cflat.optim._schedules import Radius
from cflat.optim._triggers import EmaTrigger
from cflat.optim._vectors import EPS, Vector, dot, read
from cflat.optim._weights import Weights

__all__ = ["CFlatTurbo", "TurboRules"]


@dataclass(frozen=True)
class TurboRules:
    """How the points that Algorithm 1 leaves open are read; ``"paper"`` and ``"steady"`` name two readings.

    Attributes:
        dispersion: Sigma of the trigger is the moving ``"variance"``, as printed, or the ``"deviation"``, its root,
            which does not change with the scale of the loss.
        refresh: Caches are refreshed when j mod k = 0 (``"modulo"``), or when they are k or more steps old
            (``"age"``), each branch by itself.
        surrogate: A reused branch is ref + beta |ref| unit(cache) (``"amplified"``), as printed, or
            a ref + c |ref| unit(cache) with a, c measured at the refresh (``"calibrated"``; no beta).
    """

    dispersion: Literal["variance", "deviation"] = "variance"
    refresh: Literal["modulo", "age"] = "modulo"
    surrogate: Literal["amplified", "calibrated"] = "amplified"

    @classmethod
    def named(cls, name: str) -> TurboRules:
        """Return the reading called ``name``."""
        if name not in _NAMED_RULES:
            known = list(_NAMED_RULES)
            raise ValueError(f"rules must be one of {known} or TurboRules, got {name!r}.{suggest(str(name), known)}")
        return _NAMED_RULES[name]


_NAMED_RULES = {
    "paper": TurboRules(),
    "steady": TurboRules(dispersion="deviation", refresh="age", surrogate="calibrated"),
}


@register_optimizer(
    "c_flat_turbo",
    title="C-Flat Turbo",
    summary="C-Flat with cached directions, growing intervals, adaptive trigger",
    evaluations="1 to 4",
    kept=2,
    paper="A Faster Path to Continual Learning (2026)",
)
class CFlatTurbo(SharpnessAware):
    """Descend along g_s + lam * g_f, computing both exactly every k steps and only where a trigger asks for it.

    Costs 1 evaluation when the sharpness trigger is off, 2 when both branches are reused, 4 when both are refreshed.
    Keeps two gradient-sized buffers between steps and holds two more during extra evaluations.

    Args:
        base: Any torch optimizer; its groups and schedules stay in charge of the update.
        model: The module whose buffers extra evaluations must leave alone; optional.
        rho: Radius of the neighbourhood; above 0, or a schedule.
        rho_fd: Step of the finite difference in g_f (rho'); None means ``rho``.
        lam: Weight of the flatness term; at least 0.
        beta: Length of a reused component relative to its reference gradient; at least 0.
        k: Steps from one exact computation to the next in the first task; at least 1.
        k_growth: How much k grows over the whole stream (c of the appendix); at least 0.
        threshold: How many dispersions above its mean |g|^2 must lie to trigger (m); at least 0.
        decay: Share of the past in the trigger's statistics (delta), in [0, 1).
        trigger: Whether to skip branches whose gradient is not large; False regularizes every step.
        schedule: Whether k grows with the tasks.
        rules: ``"paper"``, ``"steady"`` or a `TurboRules`: how the paper's open points are read.
        options: How steps are carried out; see `StepOptions`.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> opt = CFlatTurbo(torch.optim.SGD(model.parameters(), lr=0.1), model=model, rho=0.05, k=5)
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
        rho_fd: float | None = None,
        lam: float = 0.2,
        beta: float = 0.8,
        k: int = 5,
        k_growth: float = 10.0,
        threshold: float = 1.0,
        decay: float = 0.9,
        trigger: bool = True,
        schedule: bool = True,
        rules: str | TurboRules = "paper",
        options: StepOptions | None = None,
    ) -> None:
        if rho_fd is not None:
            check("rho_fd", rho_fd, above=0)
        check("lam", lam, at_least=0)
        check("beta", beta, at_least=0)
        check("k", k, at_least=1, integer=True)
        check("k_growth", k_growth, at_least=0)
        check("threshold", threshold, at_least=0)
        check("decay", decay, at_least=0, below=1)
        for name, flag in (("trigger", trigger), ("schedule", schedule)):
            if not isinstance(flag, bool):
                raise ValueError(f"{name} must be True or False, got {flag!r}.")
        super().__init__(base, model=model, rho=rho, options=options)
        self.rules = rules if isinstance(rules, TurboRules) else TurboRules.named(rules)
        self.rho_fd, self.lam = rho_fd, lam
        self.k, self.k_growth, self.schedule = k, k_growth, schedule
        self.threshold, self.trigger = threshold, trigger
        self.interval = k
        self.sharp = _Branch(self.rules, decay, along=0.0, beta=beta, memory=self.memory("g_vs"))
        self.flat = _Branch(self.rules, decay, along=1.0, beta=beta, memory=self.memory("g_vf"))

    def direction(self, weights: Weights) -> Direction:
        """Return g, g_s or g_s + lam * g_f, each exact or simulated (Algorithm 1)."""
        rho = self.rho
        rho_fd = rho if self.rho_fd is None else self.rho_fd
        j, k = self.task_step + 1, self.interval

        g = yield "g"
        if not self._fires(self.sharp, g):
            self.count("sharpness", "skipped", g=g.norm)
            self.count("flatness", "skipped")  # without g_s there is no proxy model to be flat around
            return g

        g_vs = self.sharp.reusable(j, k, weights.params, like=g)
        if g_vs is None:
            weights.jump(g, rho)  # theta + eps_0
            g_s = yield "g_s"
            increment = g_s.minus(g)
            _, inner = read(increment, dot(increment, g)) if k > 1 else (increment.norm, 0.0)
            weights.jump(increment, rho)  # theta_p = theta + eps_1
            self.count("sharpness", "refreshed", increment=increment.norm)
            if k > 1:
                self.sharp.store(j, weights.params, increment, g, inner)
        else:
            self.count("sharpness", "reused", g=g.norm, g_vs=g_vs.norm)
            increment = self.sharp.simulate(g_vs, reference=g)
            weights.jump(increment, rho)
            g_s = g.add_(increment)
        del g, g_vs, increment

        g_0 = yield "g_0"
        if not self._fires(self.flat, g_0):
            self.count("flatness", "skipped", g_0=g_0.norm)
            return g_s

        g_vf = self.flat.reusable(j, k, weights.params, like=g_0)
        if g_vf is not None:
            self.count("flatness", "reused", g_0=g_0.norm, g_vf=g_vf.norm)
            return g_s.add_(self.flat.simulate(g_vf, reference=g_0), self.lam)

        self.count("flatness", "refreshed", g_0=g_0.norm)
        ratio = 1.0 if self.rho_fd is None else rho / rho_fd  # a schedule may end at rho = 0
        weights.walk(g_0, rho_fd)  # theta_p + rho' * g_0 / |g_0|
        g_s.add_(g_0, -self.lam * ratio)
        self.flat.memory.clear()  # g_0 takes its place in memory until g_vf is known
        if k == 1:
            del g_0
        g_1 = yield "g_1"
        g_s.add_(g_1, self.lam * ratio)
        if k > 1:
            g_f = g_1.add_(g_0, -1.0).scale_(ratio)
            _, inner = read(g_f, dot(g_f, g_0))
            self.flat.store(j, weights.params, g_f, g_0, inner)
        return g_s

    def start_task(self, index: int, num_tasks: int | None = None) -> None:
        """Begin a task: forget caches and statistics, and set k_t = floor(k + k_growth * t / N)."""
        super().start_task(index, num_tasks)
        self.sharp.reset()
        self.flat.reset()
        self.interval = self.k
        if self.schedule and num_tasks is not None:
            self.interval += math.floor(self.k_growth * index / num_tasks + 1e-9)  # 1e-9: 7.0 may come out as 6.99...

    def cache_age(self) -> dict[str, int]:
        """Return the steps since each branch was computed exactly, for those that are cached."""
        branches = {"sharpness": self.sharp, "flatness": self.flat}
        return {name: self.task_step - b.refreshed_at for name, b in branches.items() if b.memory}

    def extra_state(self) -> dict[str, Any]:
        """Return interval, statistics, coefficients and ages."""
        return {"interval": self.interval, "sharp": self.sharp.state(), "flat": self.flat.state()}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take over interval, statistics, coefficients and ages."""
        self.interval = state["interval"]
        self.sharp.load(state["sharp"])
        self.flat.load(state["flat"])

    def _fires(self, branch: _Branch, gradient: Vector) -> bool:
        return not self.trigger or branch.trigger.fires(gradient.agreed_norm**2, self.threshold)


class _Branch:
    """One regularization term with its trigger and its cached direction.

    The term v (g_s - g, or g_f) is simulated from its reference gradient (g, or g_0) and the cached component of v
    orthogonal to it, as v = a * reference + c * |reference| * unit(cache).

    Args:
        rules: How open points are read.
        decay: Share of the past in the trigger's statistics.
        along: The coefficient a of the printed surrogate.
        beta: The coefficient c of the printed surrogate.
        memory: Where the component is kept.
    """

    def __init__(self, rules: TurboRules, decay: float, *, along: float, beta: float, memory: DirectionMemory) -> None:
        self.rules = rules
        self.trigger = EmaTrigger(decay, is_rooted=rules.dispersion == "deviation")
        self.coefficients = (along, beta)
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

    def reset(self) -> None:
        """Begin a task (the optimizer clears the memory)."""
        self.trigger.reset()
        self.refreshed_at = 0

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold besides the memory."""
        return {
            "trigger": self.trigger.state(),
            "coefficients": list(self.coefficients),
            "refreshed_at": self.refreshed_at,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self.trigger.load(state["trigger"])
        along, beta = state["coefficients"]
        self.coefficients, self.refreshed_at = (along, beta), state["refreshed_at"]
