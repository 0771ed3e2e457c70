"""The engine of a step: hand the user one evaluation after the other until the algorithm has its direction."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from cflat._errors import ClosureError
from cflat.optim._vectors import NonFiniteError, Vector
from cflat.optim._weights import Weights

if TYPE_CHECKING:
    from types import TracebackType

    from cflat.optim._base import SharpnessAware

__all__ = ["Direction", "Passes"]

Direction: TypeAlias = Generator[None, Vector, Vector]
"""An algorithm: each bare ``yield`` asks for the gradient at the present weights; it returns the direction."""


class Passes:
    """The evaluations of one step, as an iterator and a context manager.

    Inside each iteration the caller computes the loss of the same batch and calls backward (for each micro-batch,
    when accumulating). When the algorithm needs no further gradient the weights are back where they were, the
    gradients hold the direction, and the base optimizer has stepped.

    An exception inside ``with opt.passes() as passes:`` restores the weights at once; without ``with`` they are
    restored when the iterator is closed or at the next call on the optimizer.
    """

    def __init__(self, optimizer: SharpnessAware, scaler: Any = None) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self._scale = 1.0 if scaler is None else float(scaler.get_scale())
        self._weights = Weights(optimizer.all_params(), optimizer.process_group)
        self._algorithm: Direction | None = None
        self._sync: AbstractContextManager[Any] = nullcontext()
        self._index = -1
        self._state = "new"

    def __iter__(self) -> Passes:
        return self

    def __enter__(self) -> Passes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._state == "open":
            self.close()

    def __next__(self) -> int:
        """Prepare the next evaluation and return its index, or finish the step."""
        if self._state == "interrupted":
            raise ClosureError(
                "This step was given up because another call on the optimizer interrupted its passes(); the weights "
                "are restored. Call state_dict(), step() and start_task() outside the loop."
            )
        if self._state == "closed":
            raise StopIteration
        try:
            with torch.no_grad():
                is_done = self._begin() if self._index < 0 else self._advance()
        except BaseException:
            self.close()
            raise
        if is_done:
            raise StopIteration
        self._index += 1
        self._sync.__enter__()
        return self._index

    def close(self, interrupted: bool = False) -> None:
        """Give the step up: put weights, buffers, random numbers and the algorithm's state back."""
        if self._state == "open":
            self._put_back()
            self._optimizer._rollback()
            self._state = "interrupted" if interrupted else "closed"
        elif self._state == "new":
            self._state = "closed"

    def _begin(self) -> bool:
        optimizer = self._optimizer
        optimizer._open(self)
        self._state = "open"
        self._sync = optimizer._without_sync()
        self._algorithm = optimizer.direction(self._weights)
        self._weights.clear_gradients()
        optimizer._random.start(param.device for param in self._weights.candidates)
        next(self._algorithm)
        return False

    def _advance(self) -> bool:
        self._sync.__exit__(None, None, None)
        is_done, direction = self._ask()
        if is_done:
            self._finish(direction)
        else:
            self._optimizer._buffers.hold()
            self._optimizer._random.replay()
        return is_done

    def _ask(self) -> tuple[bool, Vector | None]:
        """Give the algorithm its gradient; return whether it is done, and its direction unless it met Inf or NaN."""
        assert self._algorithm is not None
        try:
            self._algorithm.send(self._collect())
        except StopIteration as stop:
            return True, stop.value
        except NonFiniteError:
            return True, None
        return False, None

    def _collect(self) -> Vector:
        gradient = self._weights.collect(self._scale)
        options = self._optimizer.options
        if options.max_norm is not None and options.clip == "each":
            _clip_(gradient, options.max_norm)
        return gradient

    def _finish(self, direction: Vector | None) -> None:
        """Apply the direction, or skip the step if there is none that is finite."""
        self._put_back()
        optimizer = self._optimizer
        if direction is not None:
            direction = self._checked(direction)
        if direction is None:
            optimizer._rollback()
            self._refuse()
        else:
            self._weights.assign(direction)
            optimizer._commit()
            self._apply()
        self._state = "closed"
        optimizer._complete(self._index + 1, is_finite=direction is not None)

    def _checked(self, direction: Vector) -> Vector | None:
        """Average over ranks if each has perturbed on its own, verify that all is finite, and clip."""
        options = self._optimizer.options
        try:
            if options.perturbation == "local":
                _average_(direction)
            if not direction.is_finite:
                _ = direction.norm
            if options.max_norm is not None and options.clip == "final":
                _clip_(direction, options.max_norm)
        except NonFiniteError:
            return None
        return direction

    def _apply(self) -> None:
        base = self._optimizer.base
        if self._scaler is None:
            base.step()
            return
        # The scaler unscales what it steps; it scales by a power of two, so this round trip is exact.
        for param in self._weights.params:
            if param.grad is not None:
                param.grad.mul_(self._scale)
        self._scaler.step(base)

    def _refuse(self) -> None:
        """Leave no gradient behind, and let a scaler see the overflow so that it backs off."""
        self._weights.clear_gradients()
        if self._scaler is not None and self._weights.params:
            param = self._weights.params[0]
            param.grad = torch.full_like(param, float("inf"))
            self._scaler.step(self._optimizer.base)
            param.grad = None

    def _put_back(self) -> None:
        if self._algorithm is not None:
            self._algorithm.close()
        self._sync.__exit__(None, None, None)
        with torch.no_grad():
            self._weights.restore()
            self._optimizer._buffers.release()
        self._optimizer._random.release()


def _clip_(vector: Vector, max_norm: float) -> None:
    if vector.agreed_norm > max_norm:
        vector.scale_(max_norm / vector.agreed_norm)


def _average_(direction: Vector) -> None:
    """Replace the direction by its mean over the ranks, in one collective per dtype and device."""
    if direction.group is None:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in direction.tensors])
    torch.distributed.all_reduce(flat, group=direction.group)
    flat /= direction.group.size()
    parts = flat.split([tensor.numel() for tensor in direction.tensors])
    torch._foreach_copy_(direction.tensors, [p.view_as(t) for p, t in zip(parts, direction.tensors, strict=True)])
    direction.is_finite = False
