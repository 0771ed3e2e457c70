"""LookSAM: SAM every k steps, and its slowly varying component in between (Liu et al., 2022)."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from cflat.optim.engine import (
    EPS,
    Count,
    Direction,
    NotNegative,
    Radius,
    SharpnessAware,
    StepOptions,
    Weights,
    dot,
    read,
    register_optimizer,
)


@register_optimizer(
    "looksam",
    title="LookSAM",
    summary="SAM every k steps, its cached orthogonal part in between",
    evaluations="1 + 1/k",
    peak_buffers=3,
    persistent_buffers=1,
    paper="Towards Efficient and Scalable Sharpness-Aware Minimization (2022)",
)
class LookSAM(SharpnessAware):
    """Descend along g_s on steps 0, k, 2k, ... of a task and along g + alpha * |g| * g_v / |g_v| in between.

    g_v is the component of g_s orthogonal to g; norms and inner products are global, as the paper writes them.
    Costs 1 + 1/k evaluations per step and keeps one gradient-sized buffer.

    Args:
        base: Any torch optimizer; its groups and schedules stay in charge of the update.
        model: The module whose buffers extra evaluations must leave alone; optional.
        rho: Radius of the perturbation; above 0, or a schedule.
        k: Steps from one exact computation to the next; at least 1, and 1 is SAM.
        alpha: Length of the reused component relative to the gradient; at least 0.
        options: How steps are taken; see `StepOptions`.
    """

    scalars = ("age",)

    def __init__(
        self,
        base: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: Radius = 0.05,
        k: Count = 5,
        alpha: NotNegative = 0.7,
        options: StepOptions | None = None,
    ) -> None:
        super().__init__(base, model=model, rho=rho, options=options)
        self.k = k
        self.alpha = alpha
        self.age = 0

    def direction(self, weights: Weights) -> Direction:
        """Return g_s, exact or simulated."""
        g = yield "g"
        g_v = None if self.task_step % self.k == 0 else self.memory("g_v").recall(weights.params, like=g)
        if g_v is not None:
            if g_v.known_norm is None:
                read(g, g_v)  # together: the host waits once
            self.age += 1
            self.count("sharpness", "reused", g=g.norm, g_v=g_v.norm)
            return g.add_(g_v, self.alpha * g.norm / (g_v.norm + EPS))

        weights.jump(g, self.rho)
        g_s = yield "g_s"
        if self.k > 1:
            g_v = g_s.minus(g)  # its component orthogonal to g is that of g_s
            # With g_s, whose check for Inf and NaN would otherwise wait for the device once more.
            _, _, inner = read(g_s, g_v, dot(g_v, g))
            g_v.remove_along_(g, inner)
            self.memory("g_v").store(weights.params, g_v)
        self.age = 0
        self.count("sharpness", "refreshed", g=g.norm)
        return g_s

    def cache_age(self) -> dict[str, int]:
        """Return the steps since g_v was computed."""
        return {"sharpness": self.age} if self.memory("g_v") else {}
