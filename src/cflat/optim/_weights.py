"""The weights during one step: move them, collect their gradient, and put them back bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cflat.optim._sharding import Sharding, is_sharded, like_parameter, local_part, sharding_of
from cflat.optim._vectors import EPS, Vector, as_real

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Weights:
    """The parameters that take part in one step.

    The first collected gradient decides which those are: parameters without a gradient are never touched. In later
    evaluations a gradient that vanished counts as zero and one that appeared is ignored. The original values are
    copied at the first move and copied back by `restore`; storage never changes. ``candidates`` are all parameters of
    the optimizer, and the ranks of ``group`` agree on decisions.
    """

    def __init__(self, candidates: Sequence[Tensor], group: ProcessGroup | None = None) -> None:
        self.candidates = candidates
        self.group = group
        self.params: list[Tensor] = []
        self._data: list[Tensor] = []
        self._sharding: Sharding | None = None
        self._theta: Vector | None = None
        self._is_sparse: list[bool] | None = None

    def jump(self, direction: Vector, radius: float) -> None:
        """Move to theta + radius * direction / |direction|."""
        self.back()
        self.walk(direction, radius)

    def back(self) -> None:
        """Move to theta, the place where the step began, before going elsewhere from there."""
        if self._theta is None:
            self._theta = self.values().clone()
        else:
            self._theta.copy_to_(self._data)

    def walk(self, direction: Vector, radius: float) -> None:
        """Move on from the present point by radius * direction / |direction|."""
        self.shift(direction, radius / (direction.norm + EPS))

    def shift(self, direction: Vector, alpha: float) -> None:
        """Move on from the present point by alpha * direction."""
        if self._theta is None:
            self.back()
        direction.add_to_(self._data, alpha)

    @property
    def are_moved(self) -> bool:
        """Whether the weights are away from where the step began."""
        return self._theta is not None

    def values(self) -> Vector:
        """Return the present weights as a vector that shares their storage."""
        return Vector(self._data, self.group, sharding=self._sharding)

    def choose(self, params: Sequence[Tensor]) -> None:
        """Name the parameters to move before there is a gradient."""
        self.params = list(params)
        self._data = [data_of(param) for param in params]
        self._sharding = sharding_of(params)

    def collect(self, scale: float = 1.0) -> Vector:
        """Take the gradient out of the parameters and divide it by the loss scale; empty if there is none."""
        if self._is_sparse is None:
            self.restore()
            active = [param for param in self.candidates if param.requires_grad and param.grad is not None]
            self._is_sparse = [param.grad.is_sparse for param in active if param.grad is not None]
            self.choose(active)
        if not self.params:
            return Vector([], norm=0.0)
        gradient = Vector([_take_gradient(param) for param in self.params], self.group, sharding=self._sharding)
        self.clear_gradients()
        return gradient if scale == 1.0 else gradient.scale_(1.0 / scale)

    def assign(self, direction: Vector) -> None:
        """Write the direction of descent into the gradients, in the layout in which they came."""
        for param, tensor, sparse in zip(self.params, direction.tensors, self._is_sparse or [], strict=True):
            gradient = torch.view_as_complex(tensor) if param.is_complex() else tensor
            param.grad = gradient.to_sparse(1) if sparse else like_parameter(gradient, param)

    def clear_gradients(self) -> None:
        """Drop all gradients of the optimizer's parameters."""
        for param in self.candidates:
            param.grad = None

    def restore(self) -> None:
        """Put the original values back; does nothing when nothing was moved."""
        if self._theta is not None:
            self._theta.copy_to_(self._data)
            self._theta = None


def data_of(param: Tensor) -> Tensor:
    """Return the values as a dense real tensor that shares the parameter's memory."""
    is_plain = not param.is_complex() and not is_sharded(param)
    return param if is_plain else as_real(local_part(param.detach(), param))


def _take_gradient(param: Tensor) -> Tensor:
    """Return the gradient as a dense real tensor that nobody else will overwrite."""
    gradient = param.grad
    if gradient is None:
        return torch.zeros_like(data_of(param))
    is_usual = type(gradient) is Tensor and gradient.layout is torch.strided and not gradient.is_complex()
    if is_usual and not gradient._is_view() and not gradient.requires_grad:  # nearly all: no more calls than these
        return gradient
    # A view (DDP's gradient buckets) is refilled by the next backward pass, so it cannot be kept as it is.
    if gradient._is_view():
        gradient = gradient.clone()
    return as_real(local_part(gradient.detach() if gradient.requires_grad else gradient, param))
