"""Directions that outlive a step, kept per parameter so that the set of parameters may change between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cflat.optim._sharding import like_parameter, local_part
from cflat.optim._vectors import Space, Vector
from cflat.optim._weights import data_of

if TYPE_CHECKING:
    from cflat.optim._weights import Weights

# A remembered direction still stands for the whole while it covers this fraction of the active elements.
_ENOUGH = 0.9


class DirectionMemory:
    """One remembered vector, addressed by parameter.

    Parameters that were not remembered count as zero; a memory that covers too little of the current parameters,
    because the model has grown or its shapes have changed, is treated as empty by `recall`.

    What a step replaces is kept until the step is taken, so that `undo` returns to it if the step is rolled back. What
    is changed in place is beyond that: use `update` instead.
    """

    def __init__(self) -> None:
        self._tensors: dict[Tensor, Tensor] = {}
        self._before: dict[Tensor, Tensor] = {}
        self._last: tuple[list[Tensor], Vector] | None = None
        self._last_before: tuple[list[Tensor], Vector] | None = None

    def __bool__(self) -> bool:
        return bool(self._tensors)

    def store(self, params: Sequence[Tensor], vector: Vector) -> None:
        """Replace the memory by ``vector``, which belongs to ``params``."""
        # A new dict, here and below: `_before` may be the present one, and `undo` needs it unchanged.
        self._tensors = dict(zip(params, vector.tensors, strict=True))
        self._last = (list(params), vector)

    def update(self, params: Sequence[Tensor], vector: Vector) -> None:
        """Replace what is remembered for ``params`` by ``vector``, and keep the rest."""
        self._tensors = {**self._tensors, **dict(zip(params, vector.tensors, strict=True))}
        self._last = (list(params), vector)

    def recall(self, params: Sequence[Tensor], like: Vector) -> Vector | None:
        """Return the remembered vector for ``params``, or None if it covers too little of them.

        The result shares the memory's storage and keeps its norm from one call to the next while the parameters stay
        the same.
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
        return list(known), self._view(list(known), list(known.values()), weights.space_of(list(known)))

    def become(self, other: DirectionMemory) -> None:
        """Take over what ``other`` remembers; algorithms may hold on to this object."""
        self._tensors, self._before = other._tensors, other._before
        self._last, self._last_before = other._last, other._last_before

    def clear(self) -> None:
        """Forget everything and free the storage."""
        self._tensors, self._before, self._last, self._last_before = {}, {}, None, None

    def commit(self) -> None:
        """Free what the step has replaced, and let go of its ranks, which may end before this memory does."""
        self._before, self._last_before = self._tensors, self._last
        if self._last is not None:
            vector = self._last[1]
            vector.space = Space(perturbed=vector.space.perturbed)

    def undo(self) -> None:
        """Return to what was remembered before the step."""
        if self._tensors is not self._before:
            # With its norm: read once more, it would be rounded differently.
            self._tensors, self._last = self._before, self._last_before
        self.commit()

    def state(self, params: Sequence[Tensor]) -> dict[str, Any]:
        """Return the remembered tensors by the position of their parameter in ``params``, and their norm."""
        tensors = {i: like_parameter(self._tensors[p], p) for i, p in enumerate(params) if p in self._tensors}
        return {"tensors": tensors, **self._known()}

    @classmethod
    def from_state(cls, params: Sequence[Tensor], state: dict[str, Any]) -> DirectionMemory:
        """Return what `state` described, moved to the parameters' devices; raises ValueError if it does not fit."""
        for index, tensor in state["tensors"].items():
            if not (isinstance(index, int) and 0 <= index < len(params)):
                raise ValueError(f"it names parameter {index!r} of {len(params)}")
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(f"parameter {index} has a direction of {kind}; expected floating point")
        parts = {params[i]: local_part(tensor.detach(), params[i]) for i, tensor in state["tensors"].items()}
        memory = cls()
        memory.__setstate__({
            "params": list(parts),
            "tensors": [part.to(param.device, copy=True) for param, part in parts.items()],
            "norm": None if state["norm"] is None else float(state["norm"]),
            "perturbed": None if state["perturbed"] is None else [bool(one) for one in state["perturbed"]],
        })  # fmt: skip
        return memory

    def _parts(self, params: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor | None]:
        """Return what is remembered for each parameter, if it still has this shape, in its present precision."""
        parts = [self._tensors.get(param) for param in params]
        return [
            None if p is None or p.shape != t.shape else p if p.dtype == t.dtype else p.to(t.dtype)
            for p, t in zip(parts, like, strict=True)
        ]

    def _completed(self, params: Sequence[Tensor], parts: list[Tensor | None], like: Vector) -> Vector:
        """Return the vector of these parts, and remember zeros for those that are missing."""
        tensors = [torch.zeros_like(t) if p is None else p for p, t in zip(parts, like.tensors, strict=True)]
        if any(part is None for part in parts):
            # The next recall then returns the same tensors, and `_view` knows their norm.
            self._tensors = {**self._tensors, **dict(zip(params, tensors, strict=True))}
        return self._view(params, tensors, like.space)

    def _view(self, params: Sequence[Tensor], tensors: list[Tensor], space: Space) -> Vector:
        """Return the vector of these tensors: the last one, with what is known about it, if it is the same."""
        if self._last is None or not (_same(params, self._last[0]) and _same(tensors, self._last[1].tensors)):
            self._last = (list(params), Vector(tensors))
        vector = self._last[1]
        if vector.space.perturbed != space.perturbed:  # groups have got other radii, and the norm is over others
            vector = Vector(tensors)
            self._last = (list(params), vector)
        vector.space = space
        return vector

    def _known(self) -> dict[str, Any]:
        """The norm of all that is remembered, if it is known; a resumed run must not round it differently."""
        if self._last is None or len(self._last[0]) != len(self._tensors):
            return {"norm": None, "perturbed": None}
        vector = self._last[1]
        return {"norm": vector.known_norm, "perturbed": vector.space.perturbed}

    def __getstate__(self) -> dict[str, Any]:
        return {"params": list(self._tensors), "tensors": list(self._tensors.values()), **self._known()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.store(state["params"], Vector(state["tensors"], Space(perturbed=state["perturbed"]), state["norm"]))
        self.commit()


def _same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
