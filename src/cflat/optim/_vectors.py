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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cflat.optim._sharding import Sharding, is_sharded, sharding_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# The value of the public SAM and C-Flat implementations.
EPS = 1e-12
"""Added to a norm before dividing by it, so that the unit vector of zero is zero."""

# A float32 norm on CPU is summed in one sweep per tensor and loses about 1e-4 beyond this many elements.
_WIDE_SUM_NUMEL = 2**22


_FEW = 2**17
"""Elements of a vector on CPU that fit into its cache."""


class NonFiniteError(ArithmeticError):
    """A gradient of this step is Inf or NaN; the step is skipped and the weights are restored."""


class LeftoverError(Exception):
    """Gradients that were there before the step were not zero, as the first read of the step has found."""


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

    __slots__ = ("_sharding", "_sharding_of_perturbed", "group", "leftover", "perturbed")

    def __init__(
        self, group: ProcessGroup | None = None, params: Sequence[Tensor] = (), perturbed: list[bool] | None = None
    ) -> None:
        self.group = group
        self.perturbed = perturbed
        self.leftover: Tensor | None = None
        """Not zero if gradients from before the step would be lost; the first `read` checks it."""
        self._sharding = self._sharding_of_perturbed = sharding_of(params)
        if self._sharding is not None:
            self._sharding_of_perturbed = sharding_of(self.chosen(params))

    @property
    def is_simple(self) -> bool:
        """Whether a norm is one number that concerns this process alone."""
        return self.group is None and self.perturbed is None and self.leftover is None

    def chosen(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return those of the tensors that are perturbed."""
        return list(tensors if self.perturbed is None else compress(tensors, self.perturbed))

    def sq_norms(self, norms: Sequence[Tensor]) -> list[Tensor]:
        """Return the squared norm of a vector, given that of each tensor, and over all tensors if some do not count."""
        if self._sharding is None and self.perturbed is None:
            norm: Tensor = torch.linalg.vector_norm(stack_scalars(norms))
            return [norm.square()]
        squares = [norm.square() for norm in norms]
        own = self.total(self.chosen(squares), like=norms[0])
        return [own] if self.perturbed is None else [own, _total(squares, self._sharding)]

    def total(self, sums: Sequence[Tensor], like: Tensor) -> Tensor:
        """Add up one sum for each perturbed tensor over all ranks that hold a part of it; 0 if there is none."""
        return _total(sums, self._sharding_of_perturbed) if sums else torch.zeros((), device=like.device)


_ALONE = Space()


class Vector:
    """A list of tensors as one vector; methods that end in ``_`` overwrite it and return it.

    Norms and inner products are over the tensors that are perturbed, which are all of them unless a parameter group
    has the radius 0.

    Args:
        tensors: Real, dense tensors, one for each parameter that takes part in the step.
        space: The ranks, shards and tensors over which norms are taken; by default this process and all tensors.
        norm: The Euclidean norm, if it is known already.
    """

    __slots__ = ("_agreed", "_norm", "_total", "is_finite", "space", "tensors")

    def __init__(self, tensors: Sequence[Tensor], space: Space = _ALONE, norm: float | None = None) -> None:
        self.tensors = list(tensors)
        self.space = space
        self._norm = norm
        self._agreed = norm if space.group is None else None
        self._total = self._agreed if space.perturbed is None else None
        # A known norm has been read, and `read` raises on Inf and NaN.
        self.is_finite = norm is not None

    @property
    def norm(self) -> float:
        """The Euclidean norm of this rank's vector; costs one host synchronisation the first time."""
        return read(self)[0] if self._norm is None else self._norm

    @property
    def agreed_norm(self) -> float:
        """The mean of the ranks' norms: equal on all ranks, so decisions must be based on it."""
        return read(self, agreed=True)[0] if self._agreed is None else self._agreed

    @property
    def total_norm(self) -> float:
        """The mean of the ranks' norms over all tensors, perturbed or not."""
        if self._total is None:
            read(self)
        assert self._total is not None
        return self._total

    def require_finite(self) -> None:
        """Raise `NonFiniteError` on all ranks if an element is Inf or NaN on one of them."""
        if self.is_finite:
            return
        if self.space.is_simple and all(t.is_cpu and t.dtype is torch.float32 for t in self.tensors):
            elements = sum(t.numel() for t in self.tensors)
            if elements <= _FEW:  # one copy and one sum take less time than a norm for each tensor
                flat = torch.cat([t.reshape(-1) for t in self.tensors])
                if not math.isfinite(_value(torch.dot(flat, flat))):
                    raise NonFiniteError("A gradient of this step is Inf or NaN.")
                self.is_finite = True
                return
        read(self)

    @property
    def known_norm(self) -> float | None:
        """The norm if it has been read or noted already."""
        return self._norm

    def know_norm(self, norm: float) -> None:
        """Note a norm that follows from others, so that it need not be read."""
        self._norm = self._agreed = norm
        self._total = norm if self.space.perturbed is None else None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(tensor.numel() for tensor in self.tensors)

    def clone(self) -> Vector:
        """Return a copy in memory of its own."""
        return self._new(clone_all(self.tensors), self._norm)

    def scaled(self, alpha: float) -> Vector:
        """Return ``alpha * self`` in new memory."""
        return self._new(torch._foreach_mul(self.tensors, alpha), _times(self._norm, alpha))

    def scale_(self, alpha: float) -> Vector:
        """Multiply by a number."""
        torch._foreach_mul_(self.tensors, alpha)
        self._norm, self._agreed = _times(self._norm, alpha), _times(self._agreed, alpha)
        self._total = _times(self._total, alpha)
        return self

    def mul_by_(self, scale: Tensor) -> Vector:
        """Multiply by a number that only the device knows."""
        for device in {tensor.device for tensor in self.tensors}:
            torch._foreach_mul_([tensor for tensor in self.tensors if tensor.device == device], scale.to(device))
        self._norm = self._agreed = self._total = None
        return self

    def add_(self, other: Vector, alpha: float | Coefficients = 1.0) -> Vector:
        """Add ``alpha * other``."""
        other.add_to_(self.tensors, alpha)
        return self._changed(other)

    def minus(self, other: Vector) -> Vector:
        """Return ``self - other`` in new memory."""
        return self._new(torch._foreach_sub(self.tensors, other.tensors), None)

    def absolute(self, plus: float) -> Vector:
        """Return ``|self| + plus``, element by element, in new memory."""
        magnitudes = torch._foreach_abs(self.tensors)
        torch._foreach_add_(magnitudes, plus)
        return self._new(magnitudes, None)

    def mul_(self, other: Vector) -> Vector:
        """Multiply element by element."""
        torch._foreach_mul_(self.tensors, other.tensors)
        return self._changed(other)

    def remove_along_(self, reference: Vector, inner: float) -> Vector:
        """Become orthogonal to ``reference``, given ``inner = dot(self, reference)``."""
        # Squared like the norm: EPS itself would bias the projection on references with a norm near 1e-6.
        return self.add_(reference, -inner / (reference.norm**2 + EPS**2))

    def copy_to_(self, targets: Sequence[Tensor]) -> None:
        """Overwrite ``targets`` with this vector, bit for bit."""
        if self.tensors:  # foreach functions reject empty lists
            torch._foreach_copy_(list(targets), self.tensors)

    def add_to_(self, targets: Sequence[Tensor], alpha: float | Coefficients) -> None:
        """Add ``alpha * self`` to ``targets``; those whose coefficient is 0 are not touched."""
        if not isinstance(alpha, Coefficients):
            torch._foreach_add_(list(targets), self.tensors, alpha=alpha)
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
            parts = flat.div_(_size(group)).split([tensor.numel() for tensor in tensors])
            torch._foreach_copy_(tensors, [p.view_as(t) for p, t in zip(parts, tensors, strict=True)])
        self._norm = self._agreed = self._total = None
        self.is_finite = False
        return self

    def _squares(self) -> list[Tensor]:
        """Return the squared norm, and that over all tensors if not all are perturbed."""
        return self.space.sq_norms(torch._foreach_norm(self.tensors, 2, dtype=_accumulator(self.tensors)))

    def _new(self, tensors: Sequence[Tensor], norm: float | None) -> Vector:
        return Vector(tensors, self.space, norm)

    def _changed(self, other: Vector) -> Vector:
        """Forget the norm; a sum of finite vectors is taken to be finite."""
        self._norm = self._agreed = self._total = None
        self.is_finite = self.is_finite and other.is_finite
        return self

    def _learn(self, local: list[float], shared: list[float]) -> tuple[float, float]:
        """Note the squares that were read, the last of which is over all tensors; return both norms."""
        self._norm, self._agreed, self._total = math.sqrt(local[0]), math.sqrt(shared[0]), math.sqrt(shared[-1])
        self.is_finite = True
        return self._norm, self._agreed


def read(*items: Vector | Tensor, agreed: bool = False) -> list[float]:
    """Fetch norms of vectors and values of device scalars with one host synchronisation.

    Returns this rank's values, or with ``agreed`` their means over the ranks, on which decisions must be based.

    All ranks of the first vector's group see the same verdict: if any value is not finite on any rank, every rank
    raises `NonFiniteError`.
    """
    if len(items) == 1 and isinstance(items[0], Vector) and items[0].space.is_simple:
        return [_read_norm(items[0])]
    scalars = [item._squares() if isinstance(item, Vector) else [item] for item in items]
    space = next((item.space for item in items if isinstance(item, Vector)), _ALONE)
    flat = [scalar for own in scalars for scalar in own]
    leftover, space.leftover = space.leftover, None
    local, shared = _fetch(stack_scalars(flat if leftover is None else [*flat, leftover]), space.group)
    # The mean is not 0 if any rank has some: all of them raise, and none waits for the others in a later collective.
    if leftover is not None and (local.pop() != 0 or shared.pop() != 0):
        raise LeftoverError
    if not all(math.isfinite(value) for value in (*local, *shared)):
        raise NonFiniteError("A gradient of this step is Inf or NaN.")
    values, position = [], 0
    for item, own in zip(items, scalars, strict=True):
        end = position + len(own)
        pair = (local[position], shared[position])
        if isinstance(item, Vector):
            pair = item._learn(local[position:end], shared[position:end])
        values.append(pair[agreed])
        position = end
    return values


def _read_norm(vector: Vector) -> float:
    """Do what `read` does for the usual case: one vector in one process, of which everything counts."""
    square = _value(vector._squares()[0])
    if not math.isfinite(square):
        raise NonFiniteError("A gradient of this step is Inf or NaN.")
    return vector._learn([square], [square])[0]


def _value(scalar: Tensor) -> float:
    return scalar.tolist()  # type: ignore[return-value]  # a number for a tensor without dimensions


def _fetch(packed: Tensor, group: ProcessGroup | None) -> tuple[list[float], list[float]]:
    """Return this rank's numbers and their means over the ranks of the group."""
    if group is None:
        numbers = packed.tolist()
        return numbers, list(numbers)
    # all_reduce works in place, and the caller's own numbers are wanted, too; both are read at once.
    total = packed.clone()
    torch.distributed.all_reduce(total, group=group)
    local, shared = torch.stack((packed, total / _size(group))).tolist()
    return local, shared


def dot(left: Vector, right: Vector) -> Tensor:
    """Return the inner product as a scalar on the device, without synchronising."""
    space, dtype = left.space, _accumulator(left.tensors)
    ours, theirs = space.chosen(left.tensors), space.chosen(right.tensors)
    if any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in ours):
        # Summing in float32 is not enough: the products would be rounded, and overflow in float16 from 256 on.
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


def _times(norm: float | None, alpha: float) -> float | None:
    return None if norm is None else abs(alpha) * norm


def _accumulator(tensors: list[Tensor]) -> torch.dtype:
    """The dtype in which sums over these tensors are accumulated."""
    for tensor in tensors:
        if tensor.dtype is torch.float64 or (tensor.numel() > _WIDE_SUM_NUMEL and tensor.device.type == "cpu"):
            return torch.float64
    return torch.float32


def stack_scalars(scalars: Sequence[Tensor]) -> Tensor:
    """Stack scalars that may differ in device and precision."""
    try:
        return torch.stack(list(scalars))
    except RuntimeError:
        return torch.stack([scalar.to(scalars[0].device) for scalar in scalars])


def _total(sums: Sequence[Tensor], sharding: Sharding | None) -> Tensor:
    stacked = stack_scalars(sums)
    return stacked.sum() if sharding is None else sharding.total(stacked)


def _size(group: ProcessGroup | None) -> int:
    return torch.distributed.get_world_size(group)
