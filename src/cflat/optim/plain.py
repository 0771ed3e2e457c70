"""No flatness at all: the base optimizer alone, behind the same interface and the same guards."""

from __future__ import annotations

from torch.optim import Optimizer
from typing_extensions import Unpack

from cflat.optim.engine import Common, Direction, SharpnessAware, Weights, register_optimizer


@register_optimizer("none", title="base optimizer", summary="the base optimizer alone", evaluations="1", held=0)
class Plain(SharpnessAware):
    """Descend along the gradient; one evaluation per step, no extra memory.

    Args:
        base: Any torch optimizer.
        model: Accepted for symmetry; a single evaluation disturbs no buffers.
        options: How steps are taken; see `StepOptions`.
    """

    _adds_to_gradients = True

    def __init__(self, base: Optimizer, **common: Unpack[Common]) -> None:
        super().__init__(base, **common)

    def direction(self, weights: Weights) -> Direction:
        """Return g."""
        g = yield "g"
        return g
