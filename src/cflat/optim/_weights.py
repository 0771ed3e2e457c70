"""The weights during one step: move them, collect their gradient, and put them back bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cflat.optim._sharding import is_sharded, like_parameter, local_part
from cflat.optim._vectors import EPS, Coefficients, Space, Vector, as_real, read

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
        self.params: list[Tensor] = []
        self.leftover: Tensor | None = None
        """Not zero if gradients from before the step would be lost; checked when the first gradient is read."""
        self._scale_of = scales or {}
        self._is_local = is_local
        self._data: list[Tensor] = []
        self._scales: Coefficients | None = None
        self._space: Space
        self._theta: Vector | None = None
        self._is_sparse: list[bool] | None = None
        self._is_used: list[bool] = []

    def jump(self, direction: Vector, radius: float) -> None:
        """Move to theta + radius * direction / |direction|."""
        self.back()
        self.walk(direction, radius)

    def back(self) -> None:
        """Move to theta, the place where the step began, before going elsewhere from there."""
        if self._theta is None:
            self._theta = Vector(self._movable()).clone()
        else:
            self._theta.copy_to_(self._movable())

    def walk(self, direction: Vector, radius: float) -> None:
        """Move on from the present point by radius * direction / |direction|."""
        self.shift(direction, radius / (direction.norm + EPS))

    def shift(self, direction: Vector, alpha: float) -> None:
        """Move on from the present point by alpha * direction."""
        if self._theta is None:
            self.back()
        direction.add_to_(self._data, alpha if self._scales is None else alpha * self._scales)

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
        self.params = list(params)
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
        if self._is_sparse is None:
            self._begin()
        if not self.params:
            return Vector([], norm=0.0)
        gradient = Vector(_take_gradients(self.params), self._space)
        # Otherwise the next backward would add to the tensors that were just taken.
        self.clear_gradients()
        # In float64, as in GradScaler.unscale_: float32 division can be imprecise under some compile options.
        return gradient if scale is None else gradient.mul_by_(scale.double().reciprocal().to(scale.dtype))

    def _begin(self) -> None:
        """Let the first gradient decide which parameters take part."""
        trainable = [param for param in self.candidates if param.requires_grad]
        used = [param.grad is not None for param in trainable]
        active = trainable if self._is_local else list(compress(trainable, used))
        self._is_used = used
        self._is_sparse = [param.grad is not None and param.grad.is_sparse for param in active]
        self.choose(active)
        self._space.leftover = self.leftover

    def average(self, direction: Vector) -> Vector:
        """Return the mean over the ranks, without parameters that none of them has used."""
        if not self._is_local or not self.params:
            return direction
        direction.average_()
        # A parameter that no rank has used gets no gradient, so that momentum and weight decay leave it alone as well.
        used = torch.tensor(self._is_used, dtype=torch.float32, device=direction.tensors[0].device)
        torch.distributed.all_reduce(used, group=self.group)
        _, *counts = read(direction, *used.unbind())
        kept = [index for index, count in enumerate(counts) if count > 0]
        self._is_sparse = [self._is_sparse[index] for index in kept] if self._is_sparse else []
        self.choose([self.params[index] for index in kept])
        mean = Vector([direction.tensors[index] for index in kept], self._space, direction.norm)
        mean.know_norm(direction.norm)  # the same on all ranks by now
        return mean

    def assign(self, direction: Vector) -> None:
        """Write the direction of descent into the gradients, in the layout in which they came."""
        for param, tensor, sparse in zip(self.params, direction.tensors, self._is_sparse or [], strict=True):
            gradient = torch.view_as_complex(tensor) if param.is_complex() else tensor
            # One sparse dimension, as in the gradients of nn.Embedding.
            param.grad = gradient.to_sparse(1) if sparse else like_parameter(gradient, param)

    def clear_gradients(self) -> None:
        """Drop all gradients of the optimizer's parameters."""
        for param in self.candidates:
            param.grad = None

    def restore(self) -> None:
        """Put the original values back; does nothing when nothing was moved."""
        if self._theta is not None:
            self._theta.copy_to_(self._movable())
            self._theta = None

    def _movable(self) -> list[Tensor]:
        if self._scales is None:
            return self._data
        return [data for data, scale in zip(self._data, self._scales, strict=True) if scale != 0.0]


def data_of(param: Tensor) -> Tensor:
    """Return the values as a dense real tensor that shares the parameter's memory."""
    is_plain = not param.is_complex() and not is_sharded(param)
    return param if is_plain else as_real(local_part(param.detach(), param))


def _take_gradients(params: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients as dense real tensors that nobody else will overwrite."""
    usual_holders, usual_uses = _USUAL or _count_owners()
    taken = []
    for param in params:
        gradient = param.grad
        if gradient is None:
            taken.append(torch.zeros_like(data_of(param)))
            continue
        is_strided = type(gradient) is Tensor and gradient.layout is torch.strided  # neither sparse nor a DTensor
        # Somebody may fill it again for the next evaluation: DDP its buckets (views), others a buffer of their own.
        # Holders are counted here, not in a function: its arguments are holders, too, and versions of Python differ.
        is_held = gradient._is_view() or sys.getrefcount(gradient) > usual_holders
        if is_held or (is_strided and _uses(gradient) > usual_uses):
            gradient = gradient.clone()
        # After backward(create_graph=True) a gradient has a graph, which a cached direction would keep alive.
        gradient = gradient.detach() if gradient.requires_grad else gradient
        is_ready = is_strided and not gradient.is_complex()
        taken.append(gradient if is_ready else as_real(local_part(gradient, param)))
    return taken


def _uses(gradient: Tensor) -> int:
    """Count the tensors that share the storage of this one."""
    return int(torch._C._storage_Use_Count(gradient.untyped_storage()._cdata))


_USUAL: tuple[int, ...] = ()


def _count_owners() -> tuple[int, ...]:
    """Learn how often a gradient is counted that nobody else holds; versions of torch and Python differ."""
    global _USUAL
    param = torch.zeros(1, requires_grad=True)
    param.grad = torch.zeros(1)
    gradient = param.grad
    _USUAL = (sys.getrefcount(gradient), _uses(gradient))
    return _USUAL
