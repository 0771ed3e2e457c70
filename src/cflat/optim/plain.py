"""No flatness at all: the base optimizer alone, behind the same interface and the same guards."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from cflat.optim.engine import Direction, SharpnessAware, StepOptions, Weights, register_optimizer


@register_optimizer("none", title="base optimizer", summary="the base optimizer alone", evaluations="1", peak_buffers=0)
class Plain(SharpnessAware):
    """Descend along the gradient; one evaluation per step, no extra memory.

    Args:
        base: Any torch optimizer.
        model: Accepted for symmetry; a single evaluation disturbs no buffers.
        options: How steps are taken; see `StepOptions`.
    """

    _adds_to_gradients = True

    def __init__(self, base: Optimizer, *, model: nn.Module | None = None, options: StepOptions | None = None) -> None:
        super().__init__(base, model=model, options=options)

    def direction(self, weights: Weights) -> Direction:
        """Return g."""
        g = yield "g"
        return g
