"""Directions that outlive a step, kept per parameter so that the set of parameters may change between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cflat.optim._sharding import like_parameter, local_part, sharding_of
from cflat.optim._vectors import Vector
from cflat.optim._weights import data_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from cflat.optim._weights import Weights

# A remembered direction still stands for the whole while it covers this share of the active elements.
_ENOUGH = 0.9


class DirectionMemory:
    """One remembered vector, addressed by parameter.

    Parameters that were not remembered count as zero; a memory that covers too little of the current parameters,
    because the model has grown or its shapes have changed, is treated as empty by `recall`.

    When a step is given up, `undo` returns to what was remembered before it. A direction that the step had replaced
    already is not kept for that, since two copies would be held at every refresh: the memory is then empty and the
    next step that needs it computes it afresh.
    """

    def __init__(self) -> None:
        self._tensors: dict[Tensor, Tensor] = {}
        self._before: dict[Tensor, Tensor] = {}
        self._last: tuple[list[Tensor], Vector] | None = None

    def __bool__(self) -> bool:
        return bool(self._tensors)

    def store(self, params: Sequence[Tensor], vector: Vector) -> None:
        """Replace the memory by ``vector``, which belongs to ``params``."""
        self.clear()
        self._tensors = dict(zip(params, vector.tensors, strict=True))
        self._last = (list(params), vector)

    def recall(self, params: Sequence[Tensor], like: Vector) -> Vector | None:
        """Return the remembered vector for ``params``, or None if it covers too little of them.

        The result shares the memory's storage, so that in-place updates are remembered, and keeps its norm from one
        call to the next while the parameters stay the same.
        """
        parts = self._parts(params, like.tensors)
        covered = sum(param.numel() for param, part in zip(params, parts, strict=True) if part is not None)
        if covered < _ENOUGH * sum(param.numel() for param in params):
            return None
        return self._completed(params, parts, like)

    def recall_or_zero(self, params: Sequence[Tensor], like: Vector) -> Vector:
        """Return the remembered vector for ``params``, with zeros for what was never remembered."""
        return self._completed(params, self._parts(params, like.tensors), like)

    def known(self, weights: Weights) -> tuple[list[Tensor], Vector]:
        """Return those of the optimizer's parameters that are remembered and trainable, and their vector."""
        trainable = [param for param in weights.candidates if param.requires_grad]
        parts = self._parts(trainable, [data_of(param) for param in trainable])
        known = {param: part for param, part in zip(trainable, parts, strict=True) if part is not None}
        return list(known), self._view(list(known), list(known.values()), weights.group)

    def clear(self) -> None:
        """Forget everything and free the storage."""
        self._tensors, self._before, self._last = {}, {}, None

    def begin(self) -> None:
        """Note what `undo` returns to; in-place changes are beyond it and belong after a step's last evaluation."""
        self._before = self._tensors

    def undo(self) -> None:
        """Return to what was remembered before the step, or to nothing if that was replaced."""
        if self._tensors is not self._before:
            self._tensors, self._last = self._before, None

    def state(self, params: Sequence[Tensor]) -> dict[str, Any]:
        """Return the remembered tensors by the position of their parameter in ``params``, and their norm."""
        tensors = {i: like_parameter(self._tensors[p], p) for i, p in enumerate(params) if p in self._tensors}
        return {"tensors": tensors, "norm": self._norm()}

    def load(self, params: Sequence[Tensor], state: dict[str, Any]) -> None:
        """Take over what `state` returned, moved to the parameters' devices."""
        parts = {params[i]: local_part(tensor.detach(), params[i]) for i, tensor in state["tensors"].items()}
        tensors = {param: part.to(param.device, copy=True) for param, part in parts.items()}
        self._restore(list(tensors), list(tensors.values()), state["norm"])

    def _restore(self, params: list[Tensor], tensors: list[Tensor], norm: float | None) -> None:
        self.store(params, Vector(tensors, norm=norm, sharding=sharding_of(params)))

    def _parts(self, params: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor | None]:
        """Return what is remembered for each parameter, if it still has this shape."""
        parts = [self._tensors.get(param) for param in params]
        return [p if p is not None and p.shape == t.shape else None for p, t in zip(parts, like, strict=True)]

    def _completed(self, params: Sequence[Tensor], parts: list[Tensor | None], like: Vector) -> Vector:
        """Return the vector of these parts, and remember zeros for those that are missing."""
        tensors = [torch.zeros_like(t) if p is None else p for p, t in zip(parts, like.tensors, strict=True)]
        if any(part is None for part in parts):
            self._tensors = {**self._tensors, **dict(zip(params, tensors, strict=True))}
        return self._view(params, tensors, like.group)

    def _view(self, params: Sequence[Tensor], tensors: list[Tensor], group: ProcessGroup | None) -> Vector:
        """Return the vector of these tensors: the last one, with what is known about it, if it is the same."""
        if self._last is None or not (_same(params, self._last[0]) and _same(tensors, self._last[1].tensors)):
            self._last = (list(params), Vector(tensors, sharding=sharding_of(params)))
        self._last[1].group = group
        return self._last[1]

    def _norm(self) -> float | None:
        """The norm of all that is remembered, if it is known; a resumed run must not round it differently."""
        if self._last is None or len(self._last[0]) != len(self._tensors):
            return None
        return self._last[1].known_norm

    def __getstate__(self) -> dict[str, Any]:
        return {"params": list(self._tensors), "tensors": list(self._tensors.values()), "norm": self._norm()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self._restore(state["params"], state["tensors"], state["norm"])


def _same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
