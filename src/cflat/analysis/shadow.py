"""`Shadow`: what an optimizer would do here, without doing it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from cflat.optim import SharpnessAware, create_optimizer
from cflat.optim.engine import BufferGuard, RandomGuard, Vector, clone_all, data_of

__all__ = ["Shadow"]


class Shadow:
    """An optimizer that looks but never steps: weights, gradients, buffers and random numbers stay as they were.

    Caches and statistics of the optimizer live on from look to look as in training, so that its reuse and its
    triggers can be watched along somebody else's trajectory.

    Args:
        name: Registered name of the optimizer.
        params: The parameters that it would train.
        model: The module whose buffers are to be guarded; optional.
        settings: Keywords of the optimizer.
    """

    def __init__(self, name: str, params: Iterable[Tensor], model: nn.Module | None = None, **settings: Any) -> None:
        self._still = _Still(params)
        self.optimizer: SharpnessAware = create_optimizer(name, self._still, model=model, **settings)
        self._buffers = BufferGuard(model)

    def look(self, closure: Callable[[], Any]) -> Vector | None:
        """Evaluate as the optimizer would and return its direction; None if it met Inf or NaN."""
        params = self.optimizer.all_params()
        before = [(param, param.grad) for param in params]
        self.optimizer.zero_grad()  # else the shadow would add to what the training loop has accumulated
        # The optimizer's own guards keep what its first evaluation has done, as a step should; a look leaves nothing.
        random = RandomGuard(is_enabled=True)
        random.start(param.device for param in params)
        self._buffers.start()
        self._still.direction = None
        try:
            self.optimizer.step(closure)
            return self._still.direction
        finally:
            self._buffers.undo()
            random.undo()
            for param, gradient in before:
                param.grad = gradient


class _Still(Optimizer):
    """A base optimizer that keeps the direction it receives and does not move."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.0})
        self.direction: Vector | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Keep the direction."""
        params = [param for group in self.param_groups for param in group["params"]]
        self.direction = Vector(clone_all([data_of(p.grad) for p in params if p.grad is not None]))
