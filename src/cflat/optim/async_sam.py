"""AsyncSAM: SAM that ascends along the gradient of the step before, at no extra evaluation (Jo et al., 2025)."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from cflat.optim.engine import Direction, Radius, SharpnessAware, StepOptions, Weights, register_optimizer


@register_optimizer(
    "async_sam",
    title="AsyncSAM",
    summary="SAM along the gradient of the step before",
    evaluations="1",
    persistent_buffers=1,
    paper="Asynchronous Sharpness-Aware Minimization For Fast and Accurate Deep Learning (2025)",
)
class AsyncSAM(SharpnessAware):
    """Descend along g_t, the gradient at theta + rho * g_{t-1} / |g_{t-1}|.

    The authors let a second device compute the stale gradient, at theta_{t-1} and on a batch of its own. Here it is the
    gradient along which the step before descended (as in S2-SAM, Ji et al., 2024), so that a step is one evaluation in
    all. The first step of a task is plain. Keeps one gradient-sized buffer; the loss that a step returns is that of its
    only evaluation, at the perturbed weights.

    Args:
        base: Any torch optimizer; its groups and schedules stay in charge of the update.
        model: The module whose buffers extra evaluations must leave alone; optional.
        rho: Radius of the perturbation; above 0, or a schedule.
        options: How steps are taken; see `StepOptions`.
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
        """Return the gradient at the end of the stale ascent."""
        memory = self.memory("stale")
        params, stale = memory.known(weights)
        if params:
            weights.choose(params)
            weights.jump(stale, self.rho)
        g = yield "g_s" if params else "g"
        self.count("sharpness", "reused" if params else "skipped", g=g.norm)
        memory.store(weights.params, g.clone())  # the base, or clipping, may overwrite what is returned
        return g
