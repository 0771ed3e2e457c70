"""C-Flat: zeroth-order sharpness and first-order flatness together (Bian et al., 2024).

Symbols follow the notation table of "A Faster Path to Continual Learning" (2026), Appendix A.1; the four gradients
are those of its Equations 4 and 5.
"""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from cflat._ranges import NotNegative, Positive
from cflat.optim.engine import Direction, Radius, SharpnessAware, StepOptions, Weights, register_optimizer


@register_optimizer(
    "c_flat",
    title="C-Flat",
    summary="sharpness and first-order flatness, exact",
    evaluations="4",
    paper="Make Continual Learning Stronger via C-Flat (2024)",
)
class CFlat(SharpnessAware):
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
        super().__init__(base, model=model, rho=rho, options=options)
        self.lam = lam
        self.rho_fd = rho_fd

    def direction(self, weights: Weights) -> Direction:
        """Return g_s + lam * (rho / rho') * (g_1 - g_0)."""
        rho = self.rho
        rho_fd = rho if self.rho_fd is None else self.rho_fd
        lam = self.lam if self.rho_fd is None else self.lam * (rho / rho_fd)  # a schedule may end at rho = 0

        g = yield "g"
        weights.jump(g, rho)  # theta + eps_0
        g_s = yield "g_s"
        increment = g.scale_(-1.0).add_(g_s)  # g_s - g, in the memory of g
        weights.jump(increment, rho)  # theta_p = theta + eps_1
        self.count("sharpness", "refreshed", increment=increment.norm)
        del g, increment

        g_0 = yield "g_0"
        weights.walk(g_0, rho_fd)  # theta_p + rho' * g_0 / |g_0|
        self.count("flatness", "refreshed", g_0=g_0.norm)
        g_s.add_(g_0, -lam)  # folded in now, so that g_0 need not be held
        del g_0
        g_1 = yield "g_1"
        return g_s.add_(g_1, lam)
