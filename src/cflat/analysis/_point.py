"""One fixed loss as a function of the weights: move them, evaluate, and leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from cflat.optim.engine import BufferGuard, RandomGuard, Vector, Weights, as_real

Loss: TypeAlias = Callable[[], Tensor]
"""Returns the loss of the present weights as a scalar tensor, without calling backward."""


class Point:
    """A place in weight space where a loss is measured; a context manager that undoes everything on the way out.

    Weights, buffers of ``model`` and the global random numbers are put back bit for bit in every exit, also by an
    exception, and ``.grad`` is never touched. Every evaluation draws the same random numbers, so a loss with dropout
    is one fixed function. The copy of the weights is made at the first move: one vector of memory.
    """

    def __init__(self, loss: Loss, params: Sequence[Tensor], model: nn.Module | None = None) -> None:
        self.params = list(params)
        if not self.params:
            raise ValueError("params is empty; pass the weights in which the landscape is measured.")
        for index, param in enumerate(self.params):
            if not param.requires_grad:
                raise ValueError(
                    f"Parameter {index} of shape {tuple(param.shape)} does not require a gradient; "
                    "leave frozen parameters out or call requires_grad_() on it."
                )
        self._loss = loss
        self._weights = Weights(self.params)
        self._weights.choose(self.params)
        self._buffers = BufferGuard(model)
        self._random = RandomGuard(is_enabled=True)

    def __enter__(self) -> Point:
        self._buffers.start()
        self._random.start(param.device for param in self.params)
        return self

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        self._weights.restore()
        self._buffers.undo()
        self._random.undo()

    def evaluate(self) -> Tensor:
        """Return the loss of the present weights with its graph."""
        with torch.enable_grad():
            value = self._call()
        if not value.requires_grad:
            raise ValueError("The loss does not depend on any parameter; compute it without no_grad() and detach().")
        return value

    @torch.no_grad()
    def value(self) -> float:
        """Return the loss of the present weights as a number."""
        return self._call().item()

    def value_at(self, *offsets: tuple[Vector, float]) -> float:
        """Return the loss at theta plus the sum of ``alpha * vector`` over the given pairs; stays there."""
        self.move(*offsets)
        return self.value()

    def value_and_gradient(self) -> tuple[float, Vector]:
        """Return the loss and its gradient at the present weights; weights that it does not reach count as zero."""
        value = self.evaluate()
        # Not backward(), which would write to .grad.
        gradients = torch.autograd.grad(value, self.params, allow_unused=True, materialize_grads=True)
        return value.item(), Vector([as_real(gradient) for gradient in gradients])

    @torch.no_grad()
    def magnitudes(self, plus: float) -> Vector:
        """Return ``|w| + plus`` of each present weight w."""
        return self._weights.values().absolute(plus)

    @torch.no_grad()
    def move(self, *offsets: tuple[Vector, float]) -> None:
        """Move to theta plus the sum of ``alpha * vector`` over the given pairs."""
        # From the copy every time: going on from the last place would add up rounding errors.
        self._weights.back()
        for vector, alpha in offsets:
            self._weights.shift(vector, alpha)

    @torch.no_grad()
    def put_between(self, start: Vector, end: Vector, fraction: float) -> None:
        """Set the weights to a point of the line from ``start`` (0) to ``end`` (1), exact at both."""
        self._weights.back()
        # lerp computes from the nearer end, so it returns `end` itself at 1; start + (end - start) would round.
        Vector(torch._foreach_lerp(start.tensors, end.tensors, fraction)).copy_to_(self._weights.values().tensors)

    def vector(self, name: str, tensors: Sequence[Tensor]) -> Vector:
        """Read tensors that are shaped like the parameters as a vector of this space."""
        shapes = [tuple(tensor.shape) for tensor in tensors]
        expected = [tuple(param.shape) for param in self.params]
        if shapes != expected:
            raise ValueError(
                f"{name} has the shapes {shapes}, but the parameters have {expected}; "
                "leave out what differs between the weight sets, such as a head that grew."
            )
        pairs = zip(tensors, self._weights.values().tensors, strict=True)
        return Vector([as_real(tensor.detach()).to(own) for tensor, own in pairs])

    def tensors(self, vector: Vector) -> list[Tensor]:
        """Return a vector of this space as tensors that are shaped like the parameters."""
        pairs = zip(vector.tensors, self.params, strict=True)
        return [torch.view_as_complex(tensor) if param.is_complex() else tensor for tensor, param in pairs]

    def _call(self) -> Tensor:
        self._random.replay()  # the same dropout mask in every evaluation
        value = self._loss()
        if value.numel() != 1:
            raise ValueError(f"The loss must be a single number, got a tensor of shape {tuple(value.shape)}.")
        return value.reshape(())
