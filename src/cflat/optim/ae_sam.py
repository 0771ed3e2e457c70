"""AE-SAM: SAM only where the gradient is large for its recent past (Jiang et al., 2023)."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from cflat.optim.engine import (
    Count,
    Direction,
    EmaTrigger,
    Fraction,
    Number,
    Radius,
    SharpnessAware,
    StepOptions,
    Weights,
    register_optimizer,
)


@register_optimizer(
    "ae_sam",
    title="AE-SAM",
    summary="SAM when |g|^2 is large compared with its recent history, else plain",
    evaluations="1 or 2",
    peak_buffers=1,
    paper="An Adaptive Policy to Employ Sharpness-Aware Minimization (2023)",
)
class AESAM(SharpnessAware):
    """Descend along g_s if |g|^2 >= mu + c_t * sigma, else along g; mu, sigma are moving mean and deviation of |g|^2.

    c_t falls linearly from ``start`` to ``end`` over ``total_steps``, so SAM becomes more frequent; without
    ``total_steps`` it stays at their mean. Costs 1 evaluation, or 2 when triggered (about half of the steps).

    Args:
        base: Any torch optimizer; its groups and schedules stay in charge of the update.
        model: The module whose buffers extra evaluations must leave alone; optional.
        rho: Radius of the perturbation; above 0, or a schedule.
        decay: Decay of the moving statistics, in [0, 1).
        start: Threshold in deviations at the first step.
        end: Threshold in deviations at the last step.
        total_steps: Total number of training steps over all tasks, if known.
        options: How steps are taken; see `StepOptions`.
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: Radius = 0.05,
        decay: Fraction = 0.9,
        start: Number = 1.0,
        end: Number = -1.0,
        total_steps: Count | None = None,
        options: StepOptions | None = None,
    ) -> None:
        super().__init__(base, model=model, rho=rho, options=options)
        self.start, self.end, self.total_steps = start, end, total_steps
        self.decay = decay
        self.trigger = EmaTrigger(decay, is_rooted=True)

    @property
    def threshold(self) -> float:
        """The present c_t, in deviations above the mean."""
        share = 0.5 if self.total_steps is None else min(self.telemetry.steps / self.total_steps, 1.0)
        return (1 - share) * self.start + share * self.end

    def direction(self, weights: Weights) -> Direction:
        """Return g_s or g."""
        g = yield "g"
        if not self.trigger.fires(g.agreed_norm**2, self.threshold):
            self.count("sharpness", "skipped", g=g.norm)
            return g
        weights.jump(g, self.rho)
        self.count("sharpness", "refreshed", g=g.norm)
        del g
        g_s = yield "g_s"
        return g_s

    def start_task(self, index: int, num_tasks: int | None = None) -> None:
        """Begin a task: forget the statistics of the one before."""
        super().start_task(index, num_tasks)
        self.trigger = EmaTrigger(self.decay, is_rooted=True)

    def extra_state(self) -> dict[str, float]:
        """Return the moving statistics."""
        return self.trigger.state()

    def load_extra_state(self, state: dict[str, float]) -> None:
        """Take over the moving statistics."""
        self.trigger.load(state)
