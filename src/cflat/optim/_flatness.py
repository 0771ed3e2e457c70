"""C-Flat's extra evaluations, written once for all optimizers that compute its terms always or sometimes.

Each is a generator for ``yield from``. A vector that is handed over is freed as soon as it is not needed, so callers
drop theirs, too, before the next evaluation.
"""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from cflat._ranges import NotNegative, Positive
from cflat.optim._base import SharpnessAware, StepOptions
from cflat.optim._passes import Direction
from cflat.optim._schedules import Radius
from cflat.optim._vectors import Vector
from cflat.optim._weights import Weights


class FlatnessAware(SharpnessAware):
    """An optimizer with the radius rho, the weight lam and the step rho' of C-Flat's terms (Equations 4 and 5)."""

    def __init__(
        self,
        base: Optimizer,
        *,
        model: nn.Module | None,
        rho: Radius,
        lam: NotNegative,
        rho_fd: Positive | None,
        options: StepOptions | None,
    ) -> None:
        super().__init__(base, model=model, rho=rho, options=options)
        self.lam = lam
        self.rho_fd = rho_fd

    @property
    def flatness_ratio(self) -> float:
        """The factor rho / rho' of g_f; a schedule may end at rho = 0."""
        return 1.0 if self.rho_fd is None else self.rho / self.rho_fd

    def sharp_gradient(self, weights: Weights, g: Vector) -> Direction:
        """Return g_s, the gradient at theta + eps_0 = theta + rho * g / |g|."""
        weights.jump(g, self.rho)
        return (yield "g_s")

    def proxy_gradient(self, weights: Weights, increment: Vector) -> Direction:
        """Return g_0, the gradient of the proxy model theta_p = theta + eps_1, eps_1 along the increment g_s - g."""
        # rho as in WanNaa/C-Flat; INFTY's port moves by 1.0 here, because the attribute it looks up is never set.
        weights.jump(increment, self.rho)
        self.note(increment=increment.norm)
        del increment
        return (yield "g_0")

    def add_flatness(self, weights: Weights, g_bar: Vector, g_0: Vector) -> Direction:
        """Add lam * g_f = lam * (rho / rho') * (g_1 - g_0) to ``g_bar``; return g_1, taken at theta_p + rho' g_0/|g_0|.

        To be asked for at theta_p.
        """
        lam = self.per_group("lam", weights) * self.flatness_ratio
        weights.walk(g_0, self.rho if self.rho_fd is None else self.rho_fd)
        self.count("flatness", "refreshed", g_0=g_0.norm)
        if self.rho_fd is not None:  # lam may be large, and lam * g_0 would round what is left of the difference
            g_1 = yield "g_1"
            g_bar.add_(g_1.minus(g_0), lam)
            return g_1
        g_bar.add_(g_0, -lam)  # folded in now, so that g_0 need not be held
        del g_0
        g_1 = yield "g_1"
        g_bar.add_(g_1, lam)
        return g_1

    def exact_direction(self, weights: Weights, g: Vector) -> Direction:
        """Return g_s + lam * g_f, in three evaluations; overwrites ``g``."""
        g_s = yield from self.sharp_gradient(weights, g)
        self.count("sharpness", "refreshed")
        # Created before `del g`: the generator is then the only holder of the increment, and drops it before it yields.
        proxy = self.proxy_gradient(weights, g.scale_(-1.0).add_(g_s))  # g_s - g, in the memory of g
        del g
        yield from self.add_flatness(weights, g_s, (yield from proxy))
        return g_s
