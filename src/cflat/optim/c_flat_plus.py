"""C-Flat++: exact C-Flat when the gradient norm rises above a moving threshold, else plain (INFTY's "plus")."""

from __future__ import annotations

import math
from typing import Annotated

from torch import nn
from torch.optim import Optimizer

from cflat.optim.engine import (
    Direction,
    FlatnessAware,
    NotNegative,
    Positive,
    Radius,
    Range,
    StepOptions,
    Weights,
    register_optimizer,
)


@register_optimizer(
    "c_flat_plus",
    title="C-Flat++",
    summary="C-Flat when |g| exceeds a moving threshold, else plain",
    evaluations="1 or 4",
    paper="C-Flat++ of the INFTY package (2025)",
)
class CFlatPlus(FlatnessAware):
    """Descend along C-Flat's direction if E_t = A_t / (1 + exp(-steepness * (t - midpoint))) - |g| <= 0, else g.

    Then A_{t+1} = A_t - gain * E_t: once the sigmoid has saturated, the threshold follows |g|, and about half of the
    steps exceed it, 2.5 evaluations on average. t counts from 1 within a task. Defaults are those of the authors'
    configuration for C-Flat++ (INFTY's class has others: rho 0.1, steepness 0.01, gain 1).

    Args:
        base: Any torch optimizer; its groups and schedules stay in charge of the update.
        model: The module whose buffers extra evaluations must leave alone; optional.
        rho: Radius of the neighbourhood; above 0, or a schedule.
        lam: Weight of the flatness term; at least 0.
        rho_fd: Step of the finite difference in g_f; None means ``rho``.
        amplitude: A_1, the threshold that the first saturated step is compared with; above 0.
        steepness: How fast the sigmoid rises per step; above 0.
        midpoint: The step at which the sigmoid is one half; at least 0.
        gain: How fast the threshold follows the gradient norm, in (0, 1].
        options: How steps are taken; see `StepOptions`.
    """

    scalars = ("amplitude",)

    def __init__(
        self,
        base: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: Radius = 0.2,
        lam: NotNegative = 0.2,
        rho_fd: Positive | None = None,
        amplitude: Positive = 5.0,
        steepness: Positive = 0.1,
        midpoint: NotNegative = 80.0,
        gain: Annotated[float, Range(above=0, at_most=1)] = 0.8,
        options: StepOptions | None = None,
    ) -> None:
        super().__init__(base, model=model, rho=rho, lam=lam, rho_fd=rho_fd, options=options)
        self.initial_amplitude = self.amplitude = amplitude
        self.steepness, self.midpoint, self.gain = steepness, midpoint, gain

    def direction(self, weights: Weights) -> Direction:
        """Return C-Flat's direction or g."""
        g = yield "g"
        if self._exceeds_threshold(g.agreed_norm):
            exact = self.exact_direction(weights, g)
            del g
            return (yield from exact)
        self.count("sharpness", "skipped", g=g.norm)
        self.count("flatness", "skipped")
        return g

    def _exceeds_threshold(self, norm: float) -> bool:
        """Compare |g| with the threshold of this step, then move the threshold towards it."""
        exponent = self.steepness * (self.task_step + 1 - self.midpoint)
        sigmoid = 0.5 * (1 + math.tanh(0.5 * exponent))  # does not overflow
        excess = self.amplitude * sigmoid - norm
        # On every step, triggered or not, as in INFTY.
        self.amplitude -= self.gain * excess
        return excess <= 0

    def start_task(self, index: int, num_tasks: int | None = None) -> None:
        """Begin a task with the initial threshold."""
        super().start_task(index, num_tasks)
        self.amplitude = self.initial_amplitude
