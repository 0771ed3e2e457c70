"""C-Flat: zeroth-order sharpness and first-order flatness together (Bian et al., 2024).

Symbols follow the notation table of "A Faster Path to Continual Learning" (2026), Appendix A.1; the four gradients
are those of its Equations 4 and 5.
"""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from cflat.optim.engine import (
    Direction,
    FlatnessAware,
    NotNegative,
    Positive,
    Radius,
    StepOptions,
    Weights,
    register_optimizer,
)


@register_optimizer(
    "c_flat",
    title="C-Flat",
    summary="sharpness and first-order flatness, exact",
    evaluations="4",
    paper="Make Continual Learning Stronger via C-Flat (2024)",
)
class CFlat(FlatnessAware):
    """Descend along g_s + lam * g_f, the gradient of L + R^0 + lam * R^1.

    Costs 4 evaluations per step. Two gradient-sized buffers are held during the extra ones, none between steps.

    Args:
        base: Any torch optimizer; its groups and schedules stay in charge of the update.
        model: The module whose buffers extra evaluations must leave alone; optional.
        rho: Radius of the neighbourhood; above 0, or a schedule.
        lam: Weight of the flatness term; at least 0, and 0 gives SAM's direction.
        rho_fd: Step of the finite difference in g_f (rho' of the appendix); None means ``rho``.
        options: How steps are taken; see `StepOptions`.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> opt = CFlat(torch.optim.SGD(model.parameters(), lr=0.1), model=model, rho=0.05, lam=0.2)
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: Radius = 0.05,
        lam: NotNegative = 0.2,
        rho_fd: Positive | None = None,
        options: StepOptions | None = None,
    ) -> None:
        super().__init__(base, model=model, rho=rho, lam=lam, rho_fd=rho_fd, options=options)

    def direction(self, weights: Weights) -> Direction:
        """Return g_s + lam * (rho / rho') * (g_1 - g_0)."""
        return (yield from self.exact_direction(weights, (yield "g")))
