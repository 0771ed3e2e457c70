"""SAM: descend along the gradient at the worst nearby point (Foret et al., 2021)."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from cflat.optim.engine import Direction, Radius, SharpnessAware, StepOptions, Weights, register_optimizer


@register_optimizer(
    "sam",
    title="SAM",
    summary="gradient at the worst point within rho",
    evaluations="2",
    peak_buffers=1,
    paper="Sharpness-Aware Minimization for Efficiently Improving Generalization (2021)",
)
class SAM(SharpnessAware):
    """Descend along g_s, the gradient at theta + rho * g / |g|.

    Costs 2 evaluations per step and one copy of the parameters during the second.

    Args:
        base: Any torch optimizer; its groups and schedules stay in charge of the update.
        model: The module whose buffers extra evaluations must leave alone; optional.
        rho: Radius of the perturbation; above 0, or a schedule.
        options: How steps are taken; see `StepOptions`.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model, rho=0.05)
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: Radius = 0.05,
        options: StepOptions | None = None,
    ) -> None:
        super().__init__(base, model=model, rho=rho, options=options)

    def direction(self, weights: Weights) -> Direction:
        """Return g_s."""
        g = yield "g"
        weights.jump(g, self.rho)  # theta + eps_0
        self.count("sharpness", "refreshed", g=g.norm)
        del g
        g_s = yield "g_s"
        return g_s
