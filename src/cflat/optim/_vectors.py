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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from cflat.optim._sharding import Sharding

EPS = 1e-12
"""Added to a norm before dividing by it, so that the unit vector of zero is zero."""

# A float32 norm on CPU is summed in one sweep per tensor and loses about 1e-4 beyond this many elements.
_WIDE_SUM_NUMEL = 2**22


class NonFiniteError(ArithmeticError):
    """A gradient of this step is Inf or NaN; the step is skipped and the weights are restored."""


class Vector:
    """A list of tensors as one vector; methods that end in ``_`` overwrite it and return it.

    Args:
        tensors: Real, dense tensors, one for each parameter that takes part in the step.
        group: The ranks that must agree on what is read from this vector; None means this process alone.
        norm: The Euclidean norm, if it is known already.
        sharding: How the tensors are spread over ranks, if they are shards.
    """

    __slots__ = ("_agreed", "_norm", "group", "is_finite", "sharding", "tensors")

    def __init__(
        self,
        tensors: Sequence[Tensor],
        group: ProcessGroup | None = None,
        norm: float | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        self.tensors = list(tensors)
        self.group = group
        self.sharding = sharding
        self._norm = norm
        self._agreed = norm if group is None else None
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
    def known_norm(self) -> float | None:
        """The norm if it has been read or noted already."""
        return self._norm

    def know_norm(self, norm: float) -> None:
        """Note a norm that follows from others, so that it need not be read."""
        self._norm = self._agreed = norm

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
        return self

    def add_(self, other: Vector, alpha: float = 1.0) -> Vector:
        """Add ``alpha * other``."""
        torch._foreach_add_(self.tensors, other.tensors, alpha=alpha)
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
        return self.add_(reference, -inner / (reference.norm**2 + EPS**2))

    def copy_to_(self, targets: Sequence[Tensor]) -> None:
        """Overwrite ``targets`` with this vector, bit for bit."""
        torch._foreach_copy_(list(targets), self.tensors)

    def add_to_(self, targets: Sequence[Tensor], alpha: float) -> None:
        """Add ``alpha * self`` to ``targets``."""
        torch._foreach_add_(list(targets), self.tensors, alpha=alpha)

    def average_(self) -> Vector:
        """Become the mean over the ranks, in one collective per dtype and device."""
        buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in self.tensors if self.group is not None else []:
            buckets.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for tensors in buckets.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            torch.distributed.all_reduce(flat, group=self.group)
            parts = flat.div_(_size(self.group)).split([tensor.numel() for tensor in tensors])
            torch._foreach_copy_(tensors, [p.view_as(t) for p, t in zip(parts, tensors, strict=True)])
        self._norm, self._agreed, self.is_finite = None, None, False
        return self

    def sq_norm(self) -> Tensor:
        """Return the squared norm as a scalar on the device, without synchronising."""
        dtype = _accumulator(self.tensors)
        norms = _stack(torch._foreach_norm(self.tensors, 2, dtype=dtype))
        if self.sharding is not None:
            return self.sharding.total(norms.square())
        total: Tensor = torch.linalg.vector_norm(norms)
        return total.square()

    def _new(self, tensors: Sequence[Tensor], norm: float | None) -> Vector:
        return Vector(tensors, self.group, norm, self.sharding)

    def _changed(self, other: Vector) -> Vector:
        """Forget the norm; a sum of finite vectors is taken to be finite."""
        self._norm = self._agreed = None
        self.is_finite = self.is_finite and other.is_finite
        return self


def read(*items: Vector | Tensor, agreed: bool = False) -> list[float]:
    """Fetch norms of vectors and values of device scalars with one host synchronisation.

    Returns this rank's values, or with ``agreed`` their means over the ranks, on which decisions must be based.

    All ranks of the first vector's group see the same verdict: if any value is not finite on any rank, every rank
    raises `NonFiniteError`.
    """
    squares = [item.sq_norm() if isinstance(item, Vector) else item for item in items]
    packed = _stack(squares)
    group = next((item.group for item in items if isinstance(item, Vector)), None)
    if group is None:
        local = shared = packed.tolist()
    else:
        total = packed.clone()
        torch.distributed.all_reduce(total, group=group)
        local, shared = torch.stack((packed, total / _size(group))).tolist()
    if not all(math.isfinite(value) for value in (*local, *shared)):
        raise NonFiniteError("A gradient of this step is Inf or NaN.")
    values = []
    for item, own, mean in zip(items, local, shared, strict=True):
        if isinstance(item, Vector):
            own, mean = math.sqrt(own), math.sqrt(mean)
            item._norm, item._agreed, item.is_finite = own, mean, True
        values.append(mean if agreed else own)
    return values


def tensor_norms(tensors: list[Tensor]) -> list[float]:
    """Fetch the norm of each tensor, Inf and NaN included, in two calls and one synchronisation; see `read`."""
    return _stack(torch._foreach_norm(tensors, 2, dtype=_accumulator(tensors))).tolist()  # type: ignore[no-any-return]


def dot(left: Vector, right: Vector) -> Tensor:
    """Return the inner product as a scalar on the device, without synchronising."""
    dtype = _accumulator(left.tensors)
    if any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in left.tensors):
        products = [a.to(dtype) * b.to(dtype) for a, b in zip(left.tensors, right.tensors, strict=True)]
    else:
        products = list(torch._foreach_mul(left.tensors, right.tensors))
    sums = _stack([product.sum(dtype=dtype) for product in products])
    return sums.sum() if left.sharding is None else left.sharding.total(sums)


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
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        return torch.float64
    is_wide = any(tensor.numel() > _WIDE_SUM_NUMEL and tensor.device.type == "cpu" for tensor in tensors)
    return torch.float64 if is_wide else torch.float32


def _stack(scalars: Sequence[Tensor]) -> Tensor:
    """Stack scalars that may differ in device and precision."""
    first = scalars[0]
    if any(scalar.device != first.device or scalar.dtype != first.dtype for scalar in scalars):
        dtype = max((scalar.dtype for scalar in scalars), key=lambda dtype: dtype.itemsize)
        scalars = [scalar.to(first.device, dtype) for scalar in scalars]
    return torch.stack(list(scalars))


def _size(group: ProcessGroup | None) -> int:
    return torch.distributed.get_world_size(group)
