"""The weights during one step: move them, collect their gradient, and put them back bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import compress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cflat.optim._sharding import is_sharded, like_parameter, local_part
from cflat.optim._vectors import EPS, Coefficients, Space, Vector, as_real, clone_all, read

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Weights:
    """The parameters that take part in one step.

    The first collected gradient decides which those are: parameters without a gradient are never touched. In later
    evaluations a gradient that vanished counts as zero and one that appeared is ignored. The original values are
    copied at the first move and copied back by `restore`; storage never changes.

    Args:
        candidates: All parameters of the optimizer.
        group: The ranks that agree on decisions.
        scales: How far a parameter moves compared with the radius that a move is given: 0 for one that is not
            perturbed, below 0 for one whose objective is maximized, 1 if it is not mentioned.
        is_local: Whether ranks differ in their gradients until `average`. Parameters that only others use take part.
    """

    def __init__(
        self,
        candidates: Sequence[Tensor],
        group: ProcessGroup | None = None,
        scales: Mapping[Tensor, float] | None = None,
        *,
        is_local: bool = False,
    ) -> None:
        self.candidates = candidates
        self.group = group
        self.params: Sequence[Tensor] = []
        self.leftover: Tensor | None = None
        """Not zero if gradients from before the step would be lost; checked when the first gradient is read."""
        self._scale_of = scales or {}
        self._is_local = is_local
        self._has_begun = False
        self._data: list[Tensor] = []
        self._scales: Coefficients | None = None
        self._space: Space
        self._theta: list[Tensor] | None = None
        self._sparse: set[Tensor] = set()
        self._is_used: list[bool] = []

    def jump(self, direction: Vector, radius: float) -> None:
        """Move to theta + radius * direction / |direction|."""
        self.back()
        self.walk(direction, radius)

    def back(self) -> None:
        """Move to theta, the place where the step began, before going elsewhere from there."""
        if self._theta is None:
            self._theta = clone_all(self._movable())
        elif self._theta:
            torch._foreach_copy_(self._movable(), self._theta)

    def walk(self, direction: Vector, radius: float) -> None:
        """Move on from the present point by radius * direction / |direction|."""
        self.shift(direction, radius / (direction.norm + EPS))

    def shift(self, direction: Vector, alpha: float) -> None:
        """Move on from the present point by alpha * direction."""
        if self._theta is None:
            self.back()
        direction.add_to_(self._data, alpha if self._scales is None else alpha * self._scales)

    def restore(self) -> None:
        """Put the original values back; does nothing when nothing was moved."""
        if self._theta is not None:
            self.back()
            self._theta = None

    @property
    def are_moved(self) -> bool:
        """Whether the weights are away from where the step began."""
        return self._theta is not None

    @property
    def scales(self) -> Coefficients:
        """How far each parameter moves compared with the radius that a move is given; see the class."""
        return self._scales or Coefficients([1.0] * len(self.params))

    def values(self) -> Vector:
        """Return the present weights as a vector that shares their storage."""
        return Vector(self._data, self._space)

    def choose(self, params: Sequence[Tensor]) -> None:
        """Name the parameters to move before there is a gradient."""
        self.params = params
        self._data = [data_of(param) for param in params]
        if self._scale_of:
            self._scales = Coefficients(self._scale_of.get(param, 1.0) for param in params)
        self._space = self.space_of(params)

    def space_of(self, params: Sequence[Tensor]) -> Space:
        """Return over what norms of vectors that belong to these parameters are taken."""
        perturbed = [self._scale_of.get(param) != 0.0 for param in params] if self._scale_of else [True]
        return Space(self.group, params, None if all(perturbed) else perturbed)

    def collect(self, scale: Tensor | None = None) -> Vector:
        """Take the gradient out of the parameters and divide it by the loss scale; empty if there is none."""
        if not self._has_begun:
            self._begin()
        if not self.params:
            return Vector([], norm=0.0)
        gradient = Vector(_take_gradients(self.params), self._space)
        if len(self.params) < len(self.candidates):
            self.clear_gradients()
        return gradient if scale is None else gradient.mul_by_(scale.double().reciprocal().to(scale.dtype))

    def _begin(self) -> None:
        """Let the first gradient decide which parameters take part."""
        self._has_begun = True
        trainable = [param for param in self.candidates if param.requires_grad]
        self._is_used = [param.grad is not None for param in trainable]
        self.choose(trainable if self._is_local else list(compress(trainable, self._is_used)))
        self._sparse = {param for param in self.params if param.grad is not None and param.grad.is_sparse}
        self._space.leftover = self.leftover

    def average(self, direction: Vector) -> Vector:
        """Return the mean over the ranks, without parameters that none of them has used."""
        if not self._is_local or not self.params:
            return direction
        direction.average_()
        used = torch.tensor(self._is_used, dtype=torch.float32, device=direction.tensors[0].device)
        torch.distributed.all_reduce(used, group=self.group)
        norm, *counts = read(direction, *used.unbind())
        is_kept = [count > 0 for count in counts]
        self.choose(list(compress(self.params, is_kept)))
        return Vector(list(compress(direction.tensors, is_kept)), self._space, norm)  # the same on all ranks by now

    def assign(self, direction: Vector) -> None:
        """Write the direction of descent into the gradients, in the layout in which they came."""
        for param, tensor in zip(self.params, direction.tensors, strict=True):
            gradient = torch.view_as_complex(tensor) if param.is_complex() else tensor
            param.grad = gradient.to_sparse(1) if param in self._sparse else like_parameter(gradient, param)

    def clear_gradients(self) -> None:
        """Drop all gradients of the optimizer's parameters."""
        for param in self.candidates:
            param.grad = None

    def _movable(self) -> list[Tensor]:
        return self._data if self._scales is None else list(compress(self._data, self._scales))


def data_of(param: Tensor) -> Tensor:
    """Return the values as a dense real tensor that shares the parameter's memory."""
    is_plain = not param.is_complex() and not is_sharded(param)
    return param if is_plain else as_real(local_part(param.detach(), param))


def _take_gradients(params: Sequence[Tensor]) -> list[Tensor]:
    """Take the gradients out, as dense real tensors of this rank that nobody else will overwrite."""
    usual_holders, usual_uses = _usual_counts()
    taken = []
    for param in params:
        gradient = param.grad
        if gradient is None:
            taken.append(torch.zeros_like(data_of(param)))
            continue
        is_plain = type(gradient) is Tensor and gradient.layout is torch.strided
        # Somebody may fill it again for the next evaluation: DDP its buckets (views), others a buffer of their own.
        is_shared = _uses(gradient) > usual_uses if is_plain else gradient._is_view()
        if is_shared or sys.getrefcount(gradient) > usual_holders:
            gradient = gradient.clone()
        if gradient.requires_grad:
            gradient = gradient.detach()
        param.grad = None
        taken.append(gradient if is_plain and not gradient.is_complex() else as_real(local_part(gradient, param)))
    return taken


def _uses(gradient: Tensor) -> int:
    """Count the tensors that share the storage of this one."""
    return int(torch._C._storage_Use_Count(gradient.untyped_storage()._cdata))


@cache
def _usual_counts() -> tuple[int, int]:
    """Return how often a gradient is counted that nobody else holds; versions of torch and Python differ."""
    param = torch.zeros(1, requires_grad=True)
    param.grad = torch.zeros(1)
    gradient = param.grad
    return sys.getrefcount(gradient), _uses(gradient)
