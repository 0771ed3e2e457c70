"""MSAM: perturb along the momentum, at no extra evaluation (Becker et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from cflat.optim.engine import (
    EPS,
    Direction,
    Fraction,
    Radius,
    SharpnessAware,
    StepOptions,
    Vector,
    Weights,
    read,
    register_optimizer,
)
from cflat.optim.qhm import QHM


@register_optimizer(
    "msam",
    title="MSAM",
    has_own_radius=True,
    summary="gradient at a point ahead along the momentum",
    evaluations="1",
    persistent_buffers=1,
    paper="Momentum-SAM: Sharpness Aware Minimization without Computational Overhead (2024)",
)
class MSAM(SharpnessAware):
    """Descend along the gradient at theta - rho * v / |v|, where v = momentum * v + g is collected over the steps.

    As in the authors' code, weight decay that the base adds to the gradient is part of g, here and in the update, and
    is taken where g is taken; a decay apart from the gradient, as AdamW's, is not. With SGD of the same momentum this
    is the authors' optimizer, v being SGD's own momentum.

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

    def direction(self, weights: Weights) -> Direction:
        """Return the gradient ahead."""
        memory = self.memory("v")
        params, v = memory.known(weights)
        length = v.norm if params else 0.0
        if params:
            weights.choose(params)
            weights.jump(v, -self.rho)
        g = yield "g_s" if params else "g"
        v = memory.recall_or_zero(weights.params, like=g)
        decays = self._decays(weights.params)
        if any(decays):  # the base will add decay * theta to what is returned
            # The authors decay the perturbed weights, the base decays theta: g carries the difference.
            pull = [decay * scale for decay, scale in zip(decays, weights.scales, strict=True)]
            g.add_(Vector(torch._foreach_mul(v.tensors, pull)), -self.rho / (length + EPS))
        v = v.scaled(self.momentum).add_(g)
        if any(decays):
            v.add_(Vector(torch._foreach_mul(weights.values().tensors, decays)))
        read(g, v)  # together, so that the next step knows |v|
        self.count("sharpness", "refreshed", g=g.norm)
        memory.update(weights.params, v)
        return g

    def _decays(self, params: Sequence[Tensor]) -> list[float]:
        """Return the weight decay that the base adds to each gradient; below 0 where it maximizes."""
        # AdamW is a subclass of Adam in recent versions of torch.
        if not isinstance(self.base, SGD | Adam | QHM) or isinstance(self.base, AdamW):
            return [0.0] * len(params)
        decay_of = {
            param: 0.0
            if group.get("decoupled_weight_decay")
            else float(group["weight_decay"]) * (-1 if group.get("maximize") else 1)
            for group in self.param_groups
            for param in group["params"]
        }
        return [decay_of[param] for param in params]
