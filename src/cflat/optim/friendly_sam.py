"""Friendly-SAM: perturb along the noise of the batch, not along the full gradient (Li et al., 2024)."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from cflat.optim.engine import (
    Coefficients,
    Direction,
    Fraction,
    NotNegative,
    Radius,
    SharpnessAware,
    StepOptions,
    Weights,
    register_optimizer,
)


@register_optimizer(
    "friendly_sam",
    title="Friendly SAM",
    summary="SAM perturbed along the batch-specific part of g",
    evaluations="2",
    peak_buffers=3,
    persistent_buffers=1,
    paper="Friendly Sharpness-Aware Minimization (2024)",
)
class FriendlySAM(SharpnessAware):
    """Descend along the gradient at theta + rho * unit(g - sigma * m), with m a moving average of past gradients.

    The average of the steps before this one is subtracted, then m = decay * m + (1 - decay) * g. As in the authors'
    code, m begins with the first gradient of each parameter, from which nothing is subtracted yet: a first step is
    SAM's. Costs 2 evaluations per step and keeps one gradient-sized buffer.

    Args:
        base: Any torch optimizer; its groups and schedules stay in charge of the update.
        model: The module whose buffers extra evaluations must leave alone; optional.
        rho: Radius of the perturbation; above 0, or a schedule.
        sigma: Share of the full-batch component to remove; at least 0, and 0 is SAM.
        decay: Decay of the moving average, in [0, 1).
        options: How steps are taken; see `StepOptions`.
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: Radius = 0.05,
        sigma: NotNegative = 1.0,
        decay: Fraction = 0.9,
        options: StepOptions | None = None,
    ) -> None:
        super().__init__(base, model=model, rho=rho, options=options)
        self.sigma = sigma
        self.decay = decay

    def direction(self, weights: Weights) -> Direction:
        """Return the gradient at the friendly perturbation."""
        g = yield "g"
        memory = self.memory("m")
        # Before `recall_or_zero`, which remembers zeros for parameters that are new.
        known = set(memory.known(weights)[0])
        m = memory.recall_or_zero(weights.params, like=g)
        noise = m.scaled(-self.sigma).add_(g)
        weights.jump(noise, self.rho)
        noise_norm = noise.norm
        del noise
        g_s = yield "g_s"
        self.count("sharpness", "refreshed", noise=noise_norm, g_s=g_s.norm)
        average = m.scaled(self.decay).add_(g, 1 - self.decay)
        # Makes m = g where there was no average yet, as in the authors' code.
        average.add_(g, Coefficients(0.0 if param in known else self.decay for param in weights.params))
        memory.update(weights.params, average)
        return g_s
