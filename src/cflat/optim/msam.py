"""MSAM: perturb along the momentum, at no extra evaluation (Becker et al., 2024)."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from cflat._ranges import Fraction
from cflat.optim.engine import Direction, Radius, SharpnessAware, StepOptions, Weights, register_optimizer


@register_optimizer(
    "msam",
    title="M-SAM",
    has_own_radius=True,
    summary="gradient at a point ahead along the momentum",
    evaluations="1",
    kept=1,
    paper="Momentum-SAM: Sharpness Aware Minimization without Computational Overhead (2024)",
)
class MSAM(SharpnessAware):
    """Descend along the gradient at theta - rho * v / |v|, where v = momentum * v + g is collected over the steps.

    Costs one evaluation per step and keeps one gradient-sized buffer of its own, whatever the base optimizer is.
    Unlike in the authors' code the weights are back at theta between steps, so they can be evaluated and saved. The
    loss that a step returns is that of its only evaluation, at the perturbed weights.

    Args:
        base: Any torch optimizer; its groups and schedules stay in charge of the update.
        model: The module whose buffers extra evaluations must leave alone; optional.
        rho: Radius of the perturbation, about ten times SAM's; above 0, or a schedule.
        momentum: Share of v that is carried over, in [0, 1).
        options: How steps are taken; see `StepOptions`.
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: Radius = 0.5,
        momentum: Fraction = 0.9,
        options: StepOptions | None = None,
    ) -> None:
        super().__init__(base, model=model, rho=rho, options=options)
        self.momentum = momentum

    @property
    def looks_ahead(self) -> bool:
        """Whether the first gradient of a step is not taken at the weights where the step begins: it is ahead."""
        return True

    def direction(self, weights: Weights) -> Direction:
        """Return the gradient ahead."""
        memory = self.memory("v")
        params, v = memory.known(weights)
        if params:
            weights.choose(params)
            weights.jump(v, -self.rho)
        g = yield "g"
        self.count("sharpness", "refreshed", g=g.norm)  # reading the norm keeps Inf and NaN out of v
        memory.recall_or_zero(weights.params, like=g).scale_(self.momentum).add_(g)
        return g
