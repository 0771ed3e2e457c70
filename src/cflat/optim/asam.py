"""ASAM: SAM in a neighbourhood that scales with each weight (Kwon et al., 2021)."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from cflat.optim.engine import (
    EPS,
    Direction,
    NotNegative,
    Radius,
    SharpnessAware,
    StepOptions,
    Weights,
    register_optimizer,
)


@register_optimizer(
    "asam",
    title="ASAM",
    has_own_radius=True,
    summary="SAM with a neighborhood scaled by |theta|",
    evaluations="2",
    peak_buffers=1,
    paper="ASAM: Adaptive Sharpness-Aware Minimization (2021)",
)
class ASAM(SharpnessAware):
    """Descend along the gradient at theta + rho * T^2 g / |T g| with T = |theta| + eta, element by element.

    Costs 2 evaluations per step and one copy of the parameters during the second. T is applied to every tensor,
    since an optimizer cannot tell weights from biases.

    Args:
        base: Any torch optimizer; its groups and schedules stay in charge of the update.
        model: The module whose buffers extra evaluations must leave alone; optional.
        rho: Radius relative to the weights, about ten times SAM's; above 0, or a schedule.
        eta: Floor of the scale, so that zero weights are perturbed too; at least 0.
        options: How steps are taken; see `StepOptions`.
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: Radius = 0.5,
        eta: NotNegative = 0.01,
        options: StepOptions | None = None,
    ) -> None:
        super().__init__(base, model=model, rho=rho, options=options)
        self.eta = eta

    def direction(self, weights: Weights) -> Direction:
        """Return g_s at the adaptively scaled perturbation."""
        g = yield "g"
        scale = weights.values().absolute(plus=self.eta)  # T
        scaled_g = g.mul_(scale)  # T g
        self.count("sharpness", "refreshed", scaled_g=scaled_g.norm)
        # Not `jump`: the radius is that of T^-1 eps, so the step is divided by |T g| and not by its own norm.
        weights.shift(scale.mul_(scaled_g), self.rho / (scaled_g.norm + EPS))
        del g, scale, scaled_g
        g_s = yield "g_s"
        return g_s
