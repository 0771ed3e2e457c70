"""VaSSO: SAM whose ascent direction is averaged over steps, so that it is less noisy (Li and Giannakis, 2023)."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from cflat.optim.engine import (
    Coefficients,
    Direction,
    Radius,
    Share,
    SharpnessAware,
    StepOptions,
    Weights,
    register_optimizer,
)


@register_optimizer(
    "vasso",
    title="VaSSO",
    summary="SAM along a moving average of gradients",
    evaluations="2",
    peak_buffers=3,
    persistent_buffers=1,
    paper="Enhancing Sharpness-Aware Optimization Through Variance Suppression (2023)",
)
class VaSSO(SharpnessAware):
    """Descend along the gradient at w + rho * d / |d|, where d = (1 - theta) * d + theta * g runs over the steps.

    As in the authors' code, d contains the gradient of this step and begins with the first gradient of each parameter.
    Costs 2 evaluations per step and keeps one gradient-sized buffer.

    Args:
        base: Any torch optimizer; its groups and schedules stay in charge of the update.
        model: The module whose buffers extra evaluations must leave alone; optional.
        rho: Radius of the perturbation; above 0, or a schedule.
        theta: Weight of this step's gradient in d, in [0, 1]; 1 is SAM.
        options: How steps are taken; see `StepOptions`.
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: Radius = 0.05,
        theta: Share = 0.9,
        options: StepOptions | None = None,
    ) -> None:
        super().__init__(base, model=model, rho=rho, options=options)
        self.theta = theta

    def direction(self, weights: Weights) -> Direction:
        """Return the gradient at the end of the averaged ascent."""
        g = yield "g"
        memory = self.memory("d")
        # Before `recall_or_zero`, which remembers zeros for parameters that are new.
        known = set(memory.known(weights)[0])
        d = memory.recall_or_zero(weights.params, like=g).scaled(1 - self.theta)
        d.add_(g, Coefficients(self.theta if param in known else 1.0 for param in weights.params))  # d = g at first
        weights.jump(d, self.rho)
        self.count("sharpness", "refreshed", d=d.norm)
        del g
        g_s = yield "g_s"
        memory.update(weights.params, d)
        return g_s
