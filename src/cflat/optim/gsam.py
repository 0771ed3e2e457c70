"""GSAM: SAM that also closes the surrogate gap (Zhuang et al., 2022)."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from cflat.optim.engine import (
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
    "gsam",
    title="GSAM",
    summary="SAM minus the part of g that is orthogonal to it",
    evaluations="2",
    paper="Surrogate Gap Minimization Improves Sharpness-Aware Training (2022)",
)
class GSAM(SharpnessAware):
    """Descend along g_s - alpha * h, where h is the component of g orthogonal to g_s.

    Costs 2 evaluations per step; the parameters and g are held during the second.

    Args:
        base: Any torch optimizer; its groups and schedules stay in charge of the update.
        model: The module whose buffers extra evaluations must leave alone; optional.
        rho: Radius of the perturbation; above 0. The original ties it to the learning rate: `TiedToLR`.
        alpha: Weight of the surrogate gap; at least 0.
        options: How steps are taken; see `StepOptions`.
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: Radius = 0.05,
        alpha: NotNegative = 0.4,
        options: StepOptions | None = None,
    ) -> None:
        super().__init__(base, model=model, rho=rho, options=options)
        self.alpha = alpha

    def direction(self, weights: Weights) -> Direction:
        """Return g_s - alpha * h."""
        g = yield "g"
        weights.jump(g, self.rho)
        g_s = yield "g_s"
        _, inner = read(g_s, dot(g, g_s))
        self.count("sharpness", "refreshed", g=g.norm, g_s=g_s.norm)
        h = g.remove_along_(g_s, inner)
        return g_s.add_(h, -self.alpha)
