"""How flat the loss is at the present weights, in two numbers that are cheap enough for the end of every run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from cflat._ranges import Count, Positive, checked
from cflat.analysis._point import Loss, Point
from cflat.analysis.hessian import Hessian, quadrature
from cflat.optim.engine import EPS, NonFiniteError

__all__ = ["Flatness", "measure_flatness"]

RADIUS = 0.05
"""The paper's radius; one for all runs, whatever they were trained with, so that their numbers can be compared."""
PRODUCTS = 12
"""Hessian-vector products: on the networks of the bench the largest eigenvalue is then known to about a percent."""


@dataclass(frozen=True)
class Flatness:
    """Small is flat; both are NaN where the gradient or the curvature is not finite."""

    sharpness: float
    """L(theta + rho * g / |g|) - L(theta)."""
    eigenvalue: float
    """The largest eigenvalue of the Hessian."""


@checked
def measure_flatness(
    loss: Loss,
    params: Sequence[Tensor],
    *,
    rho: Positive = RADIUS,
    products: Count = PRODUCTS,
    seed: int = 0,
    model: nn.Module | None = None,
) -> Flatness:
    """Measure the sharpness term and the largest eigenvalue of the Hessian.

    Costs three forward and two backward passes and ``products`` Hessian-vector products (each about two evaluations),
    and holds five vectors. The loss must be twice differentiable.

    Args:
        loss: Returns the scalar loss of the present weights; no backward.
        params: The weights, all requiring a gradient.
        rho: Radius of the sharpness term.
        products: Lanczos steps.
        seed: Seed of the starting vector.
        model: The module whose buffers the evaluations must leave alone; optional.

    >>> import torch
    >>> weights = torch.tensor([1.0, 0.0], requires_grad=True)
    >>> curvature = torch.tensor([1.0, 3.0])
    >>> found = measure_flatness(lambda: 0.5 * (curvature * weights**2).sum(), [weights])
    >>> round(found.eigenvalue, 3)
    3.0
    """
    try:
        with Point(loss, params, model) as point:
            value, gradient = point.value_and_gradient()
            raised = point.value_at((gradient, rho / (gradient.norm + EPS)))
            point.move()  # back to the weights
            # After the moves, which write to the weights in place and would invalidate its graph.
            hessian = Hessian(point)
            nodes, _ = quadrature(hessian, hessian.random_vector(seed), products)
    except NonFiniteError:
        return Flatness(math.nan, math.nan)
    return Flatness(raised - value, float(nodes.max()))
