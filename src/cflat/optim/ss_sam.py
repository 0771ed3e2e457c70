"""SS-SAM: toss a coin each step, SAM or plain (Zhao et al., 2022)."""

from __future__ import annotations

import random
from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from cflat.optim.engine import Direction, Radius, Share, SharpnessAware, StepOptions, Weights, Whole, register_optimizer


@register_optimizer(
    "ss_sam",
    title="SS-SAM",
    summary="SAM with probability p, else plain",
    evaluations="1 + p",
    peak_buffers=1,
    paper="SS-SAM: Stochastic Scheduled Sharpness-Aware Minimization (2022)",
)
class SSSAM(SharpnessAware):
    """Descend along g_s with probability p and along g otherwise.

    Costs 1 + p evaluations per step. The coin is a function of ``seed`` and the step number alone, so all ranks see
    the same side and a resumed run goes on with the same tosses.

    Args:
        base: Any torch optimizer; its groups and schedules stay in charge of the update.
        model: The module whose buffers extra evaluations must leave alone; optional.
        rho: Radius of the perturbation; above 0, or a schedule.
        p: Probability of a SAM step in [0, 1], or a function of the step number (from 0).
        seed: Chooses the sequence of tosses.
        options: How steps are taken; see `StepOptions`.
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: Radius = 0.05,
        p: Share | Callable[[int], float] = 0.5,
        seed: Whole = 0,
        options: StepOptions | None = None,
    ) -> None:
        super().__init__(base, model=model, rho=rho, options=options)
        self.p = p
        self.seed = seed

    def direction(self, weights: Weights) -> Direction:
        """Return g_s or g."""
        g = yield "g"
        if not self._is_heads(self.telemetry.steps):
            self.count("sharpness", "skipped")
            return g
        weights.jump(g, self.rho)
        self.count("sharpness", "refreshed", g=g.norm)
        del g
        g_s = yield "g_s"
        return g_s

    def _is_heads(self, step: int) -> bool:
        p = self.p(step) if callable(self.p) else self.p
        # As text: Random hashes it with SHA-512, equally in every process, and (1, 23) differs from (12, 3).
        return random.Random(f"{self.seed}/{step}").random() < p
