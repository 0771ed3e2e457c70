"""Vectors of parameter space: all list-of-tensor algebra of the optimizers, in one place.

A `Vector` is one point or direction in the space of the parameters that take part in a step. It is stored as the
list of tensors that autograd produced, so nothing is flattened or copied, and every operation is one multi-tensor
call (`torch._foreach_*`) whatever the number of tensors. Complex tensors enter as their real view, sparse ones
densified (`as_real`) and DTensors as this rank's shard, so the algebra below needs no special case.

Norms are accumulated in at least float32, and the host reads each of them once: `read` fetches any number of
device scalars with a single synchronisation, agrees on them with the other ranks, and raises `NonFiniteError` if
one of them is Inf or NaN on any rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from cflat._errors import ClosureError
from cflat.optim._sharding import Layouts, is_sharded, layouts_of, total_over_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

EPS = 1e-12
"""Added to a norm before dividing by it, so that the unit vector of zero is zero."""

# A float32 norm on CPU is summed in one sweep per tensor and loses about 1e-4 beyond this many elements.
_WIDE_SUM_NUMEL = 2**22

# Elements of a vector on CPU that fit into its cache: one copy and one sum take less time than a norm per tensor.
_FEW = 2**17


class NonFiniteError(ArithmeticError):
    """A gradient of this step is Inf or NaN; the step is skipped and the weights are restored."""


class Coefficients(tuple[float, ...]):
    """One number for each tensor of a vector, where a setting differs between parameter groups."""

    def __mul__(self, factor: float) -> Coefficients:  # type: ignore[override]
        return Coefficients(factor * value for value in self)

    __rmul__ = __mul__  # type: ignore[assignment]

    def __neg__(self) -> Coefficients:
        return self * -1.0


class Space:
    """What the vectors of one step have in common: over which ranks, shards and tensors their norms are taken.

    Args:
        group: The ranks that must agree on what is read; None means this process alone.
        params: The parameters to which the tensors belong, which may be spread over ranks.
        perturbed: Whether each tensor takes part in perturbations, and so in norms and inner products; None for all.
    """

    __slots__ = ("_all_layouts", "_layouts", "group", "leftover", "perturbed")

    def __init__(
        self, group: ProcessGroup | None = None, params: Sequence[Tensor] = (), perturbed: list[bool] | None = None
    ) -> None:
        self.group = group
        self.perturbed = perturbed
        self.leftover: Tensor | None = None
        """Not zero if gradients from before the step would be lost; the first `read` checks it."""
        self._all_layouts = layouts_of(params)
        self._layouts = self._all_layouts and layouts_of(self.chosen(params))

    def chosen(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return those of the tensors that are perturbed."""
        return list(tensors if self.perturbed is None else compress(tensors, self.perturbed))

    def sq_norms(self, norms: Sequence[Tensor]) -> list[Tensor]:
        """Return the squared norm of a vector, given that of each tensor, and over all tensors if some do not count."""
        if self._all_layouts is None and self.perturbed is None:
            return [torch.linalg.vector_norm(stack_scalars(norms)).square()]
        squares = [norm.square() for norm in norms]
        own = self.total(self.chosen(squares), like=norms[0])
        return [own] if self.perturbed is None else [own, _total(squares, self._all_layouts)]

    def total(self, sums: Sequence[Tensor], like: Tensor) -> Tensor:
        """Add up one sum for each perturbed tensor over all ranks that hold a part of it; 0 if there is none."""
        return _total(sums, self._layouts) if sums else torch.zeros((), device=like.device)


_ALONE = Space()

_Norms: TypeAlias = tuple[float, float, float | None]
"""Of this rank; the mean over the ranks; that over all tensors, perturbed or not, or None if it was not read."""


class Vector:
    """A list of tensors as one vector; methods that end in ``_`` overwrite it and return it.

    Norms and inner products are over the tensors that are perturbed, which are all of them unless a parameter group
    has the radius 0.

    Args:
        tensors: Real, dense tensors, one for each parameter that takes part in the step.
        space: The ranks, shards and tensors over which norms are taken; by default this process and all tensors.
        norm: The Euclidean norm, if it is known already and the same on all ranks.
    """

    __slots__ = ("_norms", "is_finite", "space", "tensors")

    def __init__(self, tensors: Sequence[Tensor], space: Space = _ALONE, norm: float | None = None) -> None:
        self.tensors = tensors if type(tensors) is list else list(tensors)
        self.space = space
        self._norms: _Norms | None = None
        self.is_finite = norm is not None
        if norm is not None:
            self.know_norm(norm)

    @property
    def norm(self) -> float:
        """The Euclidean norm of this rank's vector; costs one host synchronisation the first time."""
        return read(self)[0] if self._norms is None else self._norms[0]

    @property
    def agreed_norm(self) -> float:
        """The mean of the ranks' norms: equal on all ranks, so decisions must be based on it."""
        return read(self, agreed=True)[0] if self._norms is None else self._norms[1]

    @property
    def total_norm(self) -> float:
        """The mean of the ranks' norms over all tensors, perturbed or not."""
        if self._norms is None or self._norms[2] is None:
            read(self)
        assert self._norms is not None
        assert self._norms[2] is not None
        return self._norms[2]

    @property
    def known_norm(self) -> float | None:
        """The norm if it has been read or noted already."""
        return None if self._norms is None else self._norms[0]

    def know_norm(self, norm: float) -> None:
        """Note a norm that follows from others, so that it need not be read."""
        self._norms = (norm, norm, norm if self.space.perturbed is None else None)

    def require_finite(self) -> None:
        """Raise `NonFiniteError` on all ranks if an element is Inf or NaN on one of them."""
        if self.is_finite:
            return
        space, tensors = self.space, self.tensors
        is_simple = space.group is None and space.leftover is None
        if is_simple and all(t.dtype is torch.float32 and t.is_cpu for t in tensors) and self.numel <= _FEW:
            flat = torch.cat([t.reshape(-1) for t in tensors])
            _require_finite([_number(torch.dot(flat, flat))])
            self.is_finite = True
        else:
            read(self)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum([tensor.numel() for tensor in self.tensors])

    def clone(self) -> Vector:
        """Return a copy in memory of its own."""
        return self._multiple(clone_all(self.tensors), 1.0)

    def scaled(self, alpha: float) -> Vector:
        """Return ``alpha * self`` in new memory."""
        return self._multiple(torch._foreach_mul(self.tensors, alpha), alpha)

    def scale_(self, alpha: float) -> Vector:
        """Multiply by a number."""
        torch._foreach_mul_(self.tensors, alpha)
        self._norms = _times(self._norms, alpha)
        return self

    def mul_by_(self, scale: Tensor) -> Vector:
        """Multiply by a number that only the device knows."""
        for device in {tensor.device for tensor in self.tensors}:
            torch._foreach_mul_([tensor for tensor in self.tensors if tensor.device == device], scale.to(device))
        self._norms = None
        return self

    def add_(self, other: Vector, alpha: float | Coefficients = 1.0) -> Vector:
        """Add ``alpha * other``."""
        other.add_to_(self.tensors, alpha)
        return self._changed(other)

    def minus(self, other: Vector) -> Vector:
        """Return ``self - other`` in new memory."""
        return Vector(torch._foreach_sub(self.tensors, other.tensors), self.space)

    def absolute(self, plus: float) -> Vector:
        """Return ``|self| + plus``, element by element, in new memory."""
        magnitudes = torch._foreach_abs(self.tensors)
        torch._foreach_add_(magnitudes, plus)
        return Vector(magnitudes, self.space)

    def mul_(self, other: Vector) -> Vector:
        """Multiply element by element."""
        torch._foreach_mul_(self.tensors, other.tensors)
        return self._changed(other)

    def remove_along_(self, reference: Vector, inner: float) -> Vector:
        """Become orthogonal to ``reference``, given ``inner = dot(self, reference)``."""
        return self.add_(reference, -inner / (reference.norm**2 + EPS**2))

    def copy_to_(self, targets: Sequence[Tensor]) -> None:
        """Overwrite ``targets`` with this vector, bit for bit."""
        if self.tensors:
            torch._foreach_copy_(targets, self.tensors)  # type: ignore[arg-type]

    def add_to_(self, targets: Sequence[Tensor], alpha: float | Coefficients) -> None:
        """Add ``alpha * self`` to ``targets``; those whose coefficient is 0 are not touched."""
        if not isinstance(alpha, Coefficients):
            torch._foreach_add_(targets, self.tensors, alpha=alpha)  # type: ignore[call-overload]
            return
        for value in set(alpha) - {0.0}:
            members = [index for index, own in enumerate(alpha) if own == value]
            torch._foreach_add_([targets[i] for i in members], [self.tensors[i] for i in members], alpha=value)

    def average_(self) -> Vector:
        """Become the mean over the ranks, in one collective per dtype and device."""
        group = self.space.group
        buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in self.tensors if group is not None else []:
            buckets.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for tensors in buckets.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            torch.distributed.all_reduce(flat, group=group)
            parts = flat.div_(torch.distributed.get_world_size(group)).split([tensor.numel() for tensor in tensors])
            torch._foreach_copy_(tensors, [p.view_as(t) for p, t in zip(parts, tensors, strict=True)])
        self._norms = None
        self.is_finite = False
        return self

    def _multiple(self, tensors: Sequence[Tensor], alpha: float) -> Vector:
        vector = Vector(tensors, self.space)
        vector._norms = _times(self._norms, alpha)
        vector.is_finite = vector._norms is not None
        return vector

    def _changed(self, other: Vector) -> Vector:
        """Forget the norm; a sum of finite vectors is taken to be finite."""
        self._norms = None
        self.is_finite = self.is_finite and other.is_finite
        return self

    def _squares(self) -> list[Tensor]:
        """Return the squared norm, and that over all tensors if not all are perturbed."""
        return self.space.sq_norms(torch._foreach_norm(self.tensors, 2, dtype=_accumulator(self.tensors)))


def read(*items: Vector | Tensor, agreed: bool = False) -> list[float]:
    """Fetch norms of vectors and values of device scalars with one host synchronisation.

    Returns this rank's values, or with ``agreed`` their means over the ranks, on which decisions must be based.

    All ranks of the first vector's group see the same verdict: if any value is not finite on any rank, every rank
    raises `NonFiniteError`.
    """
    scalars = [item._squares() if isinstance(item, Vector) else [item] for item in items]
    space = next((item.space for item in items if isinstance(item, Vector)), _ALONE)
    flat = [scalar for own in scalars for scalar in own]
    leftover, space.leftover = space.leftover, None
    local, shared = _fetch(flat if leftover is None else [*flat, leftover], space.group)
    if leftover is not None and (local[-1] != 0 or shared[-1] != 0):
        raise ClosureError(
            "There are gradients that were accumulated before this step, which it would have to drop: it needs all "
            "micro-batches again at other weights. Loop over the micro-batches inside the closure or inside "
            "optimizer.passes(), or keep them with cflat.integrations, which serves Lightning, Trainer, Accelerate and "
            "trainers of your own. If these gradients are left over, call optimizer.zero_grad() before the step."
        )
    _require_finite(local if shared is local else local + shared)
    values, position = [], 0
    for item, own in zip(items, scalars, strict=True):
        pair = (local[position], shared[position])
        position += len(own)
        if isinstance(item, Vector):
            total = math.sqrt(shared[position - 1])  # the last of a vector's squares is over all tensors
            item._norms = (math.sqrt(pair[0]), math.sqrt(pair[1]), total)
            item.is_finite = True
            pair = item._norms[:2]
        values.append(pair[agreed])
    return values


def _times(norms: _Norms | None, alpha: float) -> _Norms | None:
    if norms is None:
        return None
    own, agreed, total = norms
    return abs(alpha) * own, abs(alpha) * agreed, None if total is None else abs(alpha) * total


def _fetch(scalars: list[Tensor], group: ProcessGroup | None) -> tuple[list[float], list[float]]:
    """Return this rank's numbers and their means over the ranks of the group."""
    if group is None:
        numbers = stack_scalars(scalars).tolist() if len(scalars) > 1 else [_number(scalars[0])]
        return numbers, numbers
    packed = stack_scalars(scalars)
    total = packed.clone()
    torch.distributed.all_reduce(total, group=group)
    local, shared = torch.stack((packed, total / torch.distributed.get_world_size(group))).tolist()
    return local, shared


def _number(scalar: Tensor) -> float:
    return scalar.tolist()  # type: ignore[return-value]  # a number for a tensor without dimensions


def _require_finite(numbers: list[float]) -> None:
    if not all(map(math.isfinite, numbers)):
        raise NonFiniteError("A gradient of this step is Inf or NaN.")


def dot(left: Vector, right: Vector) -> Tensor:
    """Return the inner product as a scalar on the device, without synchronising."""
    space, dtype = left.space, _accumulator(left.tensors)
    ours, theirs = space.chosen(left.tensors), space.chosen(right.tensors)
    if any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in ours):
        products = [a.to(dtype) * b.to(dtype) for a, b in zip(ours, theirs, strict=True)]
    else:
        products = list(torch._foreach_mul(ours, theirs)) if ours else []
    return space.total([product.sum(dtype=dtype) for product in products], like=left.tensors[0])


def filter_norms(param: Tensor) -> Tensor:
    """Return the norm of each row of a parameter, (rows, 1, ...), whole on every rank."""
    values: Any = param.detach()
    values = torch.view_as_real(values) if param.is_complex() else values
    norms: Any = torch.linalg.vector_norm(values, dim=tuple(range(1, values.ndim)), keepdim=True)
    whole: Tensor = norms.full_tensor() if is_sharded(param) else norms
    return whole


def clone_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy all tensors, in one call where torch has one."""
    clone = getattr(torch, "_foreach_clone", None)
    return [tensor.clone() for tensor in tensors] if clone is None or not tensors else list(clone(tensors))


def as_real(tensor: Tensor) -> Tensor:
    """Return a dense, real tensor with the same content (a view wherever there can be one)."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def stack_scalars(scalars: Sequence[Tensor]) -> Tensor:
    """Stack scalars that may differ in device and precision."""
    try:
        return torch.stack(scalars)  # type: ignore[arg-type]
    except RuntimeError:
        return torch.stack([scalar.to(scalars[0].device) for scalar in scalars])


def _accumulator(tensors: list[Tensor]) -> torch.dtype:
    """The dtype in which sums over these tensors are accumulated."""
    for tensor in tensors:
        if tensor.dtype is torch.float64 or (tensor.numel() > _WIDE_SUM_NUMEL and tensor.is_cpu):
            return torch.float64
    return torch.float32


def _total(sums: Sequence[Tensor], layouts: Layouts | None) -> Tensor:
    stacked = stack_scalars(sums)
    return stacked.sum() if layouts is None else total_over_ranks(stacked, layouts)
