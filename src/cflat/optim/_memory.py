"""Directions that outlive a step, kept per parameter so that the set of parameters may change between steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cflat.optim._vectors import Vector

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DirectionMemory"]

# A remembered direction still stands for the whole while it covers this share of the active elements.
_ENOUGH = 0.9


class DirectionMemory:
    """One remembered vector, addressed by parameter.

    Parameters that were not remembered count as zero; a memory that covers too little of the current parameters,
    because the model has grown or its shapes have changed, is treated as empty by `recall`.
    """

    def __init__(self) -> None:
        self._tensors: dict[Tensor, Tensor] = {}
        self._last: tuple[list[Tensor], Vector] | None = None

    def __bool__(self) -> bool:
        return bool(self._tensors)

    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over the parameters that have a remembered part."""
        return iter(self._tensors)

    def store(self, params: Sequence[Tensor], vector: Vector) -> None:
        """Replace the memory by ``vector``, which belongs to ``params``."""
        self._tensors = dict(zip(params, vector.tensors, strict=True))
        self._last = (list(params), vector)

    def recall(self, params: Sequence[Tensor], like: Vector) -> Vector | None:
        """Return the remembered vector for ``params``, or None if it covers too little of them.

        The result shares the memory's storage, so that in-place updates are remembered, and keeps its norm from one
        call to the next while the parameters stay the same.
        """
        if self._last is not None and _same(params, self._last[0]):
            return self._last[1]
        parts = [self._part(param, tensor) for param, tensor in zip(params, like.tensors, strict=True)]
        covered = sum(part.numel() for part in parts if part is not None)
        if covered < _ENOUGH * like.numel:
            return None
        return self._attach(params, parts, like)

    def recall_or_zero(self, params: Sequence[Tensor], like: Vector) -> Vector:
        """Return the remembered vector for ``params``, with zeros for what was never remembered."""
        if self._last is not None and _same(params, self._last[0]):
            return self._last[1]
        parts = [self._part(param, tensor) for param, tensor in zip(params, like.tensors, strict=True)]
        return self._attach(params, parts, like)

    def known(self, group: ProcessGroup | None) -> tuple[list[Tensor], Vector]:
        """Return all remembered parameters and their vector."""
        params = [param for param in self._tensors if param.requires_grad]
        if self._last is None or not _same(params, self._last[0]):
            self._last = (params, Vector([self._tensors[param] for param in params], group))
        return self._last

    def clear(self) -> None:
        """Forget everything and free the storage."""
        self._tensors, self._last = {}, None

    def state(self, params: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the remembered tensors by the position of their parameter in ``params``."""
        return {index: self._tensors[p] for index, p in enumerate(params) if p in self._tensors}

    def load(self, params: Sequence[Tensor], state: dict[int, Tensor]) -> None:
        """Take over what `state` returned, moved to the parameters' devices."""
        self.clear()
        self._tensors = {
            params[index]: tensor.detach().to(params[index].device, copy=True) for index, tensor in state.items()
        }

    def _part(self, param: Tensor, like: Tensor) -> Tensor | None:
        part = self._tensors.get(param)
        return part if part is not None and part.shape == like.shape else None

    def _attach(self, params: Sequence[Tensor], parts: list[Tensor | None], like: Vector) -> Vector:
        tensors = [
            torch.zeros_like(tensor) if part is None else part for part, tensor in zip(parts, like.tensors, strict=True)
        ]
        self._tensors.update(zip(params, tensors, strict=True))
        vector = Vector(tensors, like.group)
        self._last = (list(params), vector)
        return vector

    def __getstate__(self) -> dict[str, object]:
        return {"tensors": list(self._tensors.items())}

    def __setstate__(self, state: dict[str, list[tuple[Tensor, Tensor]]]) -> None:
        self._tensors, self._last = dict(state["tensors"]), None


def _same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
