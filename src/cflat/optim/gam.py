"""GAM: gradient norm aware minimization, first-order flatness alone (Zhang et al., 2023)."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from cflat.optim.engine import (
    Direction,
    NotNegative,
    Number,
    Positive,
    Radius,
    Range,
    SharpnessAware,
    StepOptions,
    Weights,
    dot,
    read,
    register_optimizer,
)


@register_optimizer(
    "gam",
    title="GAM",
    has_own_radius=True,
    summary="first-order flatness: small gradient norm within rho",
    evaluations="4",
    peak_buffers=3,
    paper="Gradient Norm Aware Minimization Seeks First-Order Flatness (2023)",
)
class GAM(SharpnessAware):
    """Descend along d - gamma * (m - proj_d m) with d = b_1 g_1 + b_3 g_3 and m = g + |b_2| g_2.

    g_1 is the gradient at theta + rho_fd * unit(g), g_2 at theta_p = theta + rho * unit(g_1 - g) and g_3 at
    theta_p + rho_fd * unit(g_2): the accelerated form of the authors' code. Costs 4 evaluations per step; the
    parameters, d and m are held during the last two.

    Args:
        base: Any torch optimizer; its groups and schedules stay in charge of the update.
        model: The module whose buffers extra evaluations must leave alone; optional.
        rho: Radius within which the gradient norm is made small; above 0, or a schedule.
        rho_fd: Length of the finite-difference steps; above 0.
        gamma: Weight of the orthogonal part of m; at least 0.
        betas: The weights b_1, b_2, b_3; by default those of the authors' script for ResNets on CIFAR-100. With
            b_1 + b_3 = 1, as always there, d is as long as a gradient.
        options: How steps are taken; see `StepOptions`.
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: Radius = 0.2,
        rho_fd: Positive = 0.02,
        gamma: NotNegative = 0.03,
        betas: tuple[Number, Number, Number] = (0.6, 0.5, 0.4),
        options: StepOptions | None = None,
    ) -> None:
        if not isinstance(betas, tuple | list) or [Range().holds(b) for b in betas] != [True] * 3:
            raise ValueError(f"betas must be three finite numbers, got {betas!r}.")
        super().__init__(base, model=model, rho=rho, options=options)
        self.rho_fd = rho_fd
        self.gamma = gamma
        self.betas = tuple(betas)

    def direction(self, weights: Weights) -> Direction:
        """Return d - gamma * (m - proj_d m)."""
        b_1, b_2, b_3 = self.betas
        g = yield "g"
        weights.jump(g, self.rho_fd)
        g_1 = yield "g_1"
        weights.jump(g_1.minus(g), self.rho)  # theta_p
        self.count("flatness", "refreshed", g=g.norm)
        d, m = g_1.scale_(b_1), g
        del g, g_1
        g_2 = yield "g_2"
        weights.walk(g_2, self.rho_fd)
        # The authors' code takes the magnitude as well; its own default for b_2 is -1.
        m.add_(g_2, abs(b_2))
        del g_2
        g_3 = yield "g_3"
        d.add_(g_3, b_3)
        del g_3
        _, inner = read(d, dot(m, d))
        return d.add_(m.remove_along_(d, inner), -self.gamma)
