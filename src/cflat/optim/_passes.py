"""The engine of a step: hand the user one evaluation after the other until the algorithm has its direction."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch._compile import _disable_dynamo  # torch.compiler.disable, without importing the compiler at once

from cflat._errors import ClosureError
from cflat.optim._callers import mark_gradients, total_magnitude, with_foreign_gradient
from cflat.optim._guards import RandomGuard
from cflat.optim._scaling import LossScale
from cflat.optim._vectors import NonFiniteError, Vector

if TYPE_CHECKING:
    from cflat.optim._base import SharpnessAware

Direction: TypeAlias = Generator[str | None, Vector, Vector]
"""An algorithm: each ``yield`` asks for the gradient at the present weights, by name; it returns the direction."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One gradient on its way to the algorithm, as a gradient hook sees it; read it, copy what you keep."""

    name: str | None
    """The symbol by which the algorithm asked for it, for example ``"g_s"``."""
    gradient: Vector
    loss: Any
    """What the closure returned; None in a loop over `passes`."""


class Passes:
    """The evaluations of one step, as an iterator and a context manager.

    Inside each iteration the caller computes the loss of the same batch and calls backward (for each micro-batch,
    when accumulating). When the algorithm needs no further gradient the weights are back where they were, the
    gradients hold the direction, and the base optimizer has stepped.

    A step that is left before its end is rolled back, and all is as if it had never begun: weights, buffers, random
    numbers and the algorithm's state. An exception inside ``with opt.passes() as passes:`` does so at once; without
    ``with`` it happens when the iterator is closed or dropped, or at the next call on the optimizer.

    Made by `SharpnessAware.passes`, and by `SharpnessAware.step`, which sets ``is_loop=False``: torch runs its hooks.
    """

    _state = "new"
    _context: AbstractContextManager[Any] | None = None  # of the evaluation that is under way

    def __init__(
        self, optimizer: SharpnessAware, scaler: Any = None, *, accumulated: bool = False, is_loop: bool = True
    ) -> None:
        self._optimizer = optimizer
        self._scale = LossScale(scaler, optimizer)
        self._buffers = optimizer._buffers
        self._random = RandomGuard(optimizer.options.replay_rng)
        self._index = -1
        self._is_loop = is_loop
        self.loss: Any = None
        self.replays = not accumulated
        """Whether this evaluation must compute again what was accumulated before the step began."""

    def __iter__(self) -> Passes:
        return self

    @_disable_dynamo  # a graph that was traced through moves and decisions would be wrong
    def __next__(self) -> int:
        """Prepare the next evaluation and return its index, or finish the step."""
        index = self.advance()
        if index is None:
            raise StopIteration
        return index

    def __enter__(self) -> Passes:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        was_not_looped_over = self._state == "new"
        self.close()
        if was_not_looped_over and kind is None:
            raise ClosureError(
                "`with optimizer.passes() as passes:` was left without its loop, so no step was taken. Write "
                "`for _ in passes:` inside it, and compute the loss and call backward in that loop."
            )

    def __del__(self) -> None:
        if self._state == "open":
            self.close()

    def advance(self) -> int | None:
        """Prepare the next evaluation and return its index; None if there was none and the step is finished."""
        if self._state == "interrupted":
            raise ClosureError(
                "This step was rolled back because another call on the optimizer interrupted its passes(); the weights "
                "are restored. Call state_dict(), step() and start_task() outside the loop."
            )
        if self._state == "closed":
            return None
        if self._state == "new":
            self._run_hooks(self._optimizer._optimizer_step_pre_hooks)
        has_gradients = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # as torch.no_grad() does, in a hundredth of its time
        try:
            if self._state == "new":
                self._start()
            else:
                self._go_on()
        except BaseException:
            self.close()
            raise
        finally:
            torch._C._set_grad_enabled(has_gradients)
        torch.clear_autocast_cache()  # of weights that have moved since they were cast
        if self._state == "closed":
            self._run_hooks(self._optimizer._optimizer_step_post_hooks)
            return None
        self._index += 1
        if self._new_context is not None:
            context = self._new_context()
            context.__enter__()
            self._context = context
        return self._index

    def close(self, interrupted: bool = False) -> None:
        """Roll the step back: put weights, buffers, random numbers and the algorithm's state back."""
        if self._state == "open":
            self._leave()
            self._random.undo()
            self._undo()
            torch.clear_autocast_cache()
        if self._state in ("new", "open"):
            self._state = "interrupted" if interrupted else "closed"

    def _start(self) -> None:
        """Ask the algorithm where it wants its first gradient."""
        self._new_context = _context_of(self._optimizer)
        self._weights = self._optimizer._open(self)
        self._buffers.start()
        self._random.start({param.device for param in self._weights.candidates if not param.is_cpu})
        self._algorithm = self._optimizer.direction(self._weights)
        self._state = "open"  # from here on there is something to roll back
        self._asked = next(self._algorithm)
        self._settle_gradients()

    def _settle_gradients(self) -> None:
        """Keep gradients that begin the first evaluation, and note others, which may have been left over."""
        weights, is_accumulated = self._weights, not self.replays
        foreign = with_foreign_gradient(weights.candidates)
        adds = is_accumulated or self._optimizer._adds_to_gradients
        if foreign and adds and not weights.are_moved:
            for param in set(weights.candidates) - set(foreign):
                param.grad = None
            return
        self.replays = True
        if foreign and not is_accumulated:  # they are zero, or lost: found out when the first norm is read
            weights.leftover = total_magnitude(foreign)
        elif weights.group is not None:  # all ranks read as many numbers
            weights.leftover = torch.zeros((), device=weights.candidates[0].device)
        weights.clear_gradients()

    def _go_on(self) -> None:
        """Give the algorithm its gradient; prepare the evaluation that it asks for, or finish the step."""
        self._close_context()
        direction: Vector | None
        try:
            direction = self._collect()
            if direction.tensors:  # else no parameter takes part in this step
                self._asked = self._algorithm.send(direction)
                self._buffers.hold()
                self._random.replay()
                self.replays = True
                return
        except StopIteration as stop:
            direction = stop.value
        except NonFiniteError:
            direction = None
        self._finish(direction)

    def _collect(self) -> Vector:
        weights, optimizer = self._weights, self._optimizer
        if all(param.grad is None for param in weights.candidates) and any(p.requires_grad for p in weights.candidates):
            raise ClosureError(
                f"Evaluation {self._index + 1} of this step left no gradient in any parameter of the optimizer. Call "
                "loss.backward() in every evaluation, on a loss that depends on these parameters."
            )
        if self._index == 0:
            weights.restore()  # which parameters are moved from here on is decided by this gradient
        gradient = weights.collect(self._scale.value)
        self._clip_(gradient, "each")
        if optimizer._gradient_hooks and gradient.tensors:
            for hook in list(optimizer._gradient_hooks.values()):
                hook(Evaluation(self._asked, gradient, self.loss))
        return gradient

    def _finish(self, direction: Vector | None) -> None:
        """Apply the direction, or skip the step if there is none that is finite."""
        self._leave()
        self._random.release()  # a skipped step has consumed its random numbers, too
        direction = None if direction is None else self._checked(direction)
        if direction is None:
            self._undo()
            self._scale.report_overflow(self._weights.params)
            self._complete(is_finite=False)
            return
        self._buffers.release()
        scale = self._scale.value
        if scale is not None and direction.tensors:
            direction.mul_by_(scale)  # the scaler unscales what it steps; exact, as scales are powers of two
        self._weights.assign(direction)
        self._step_base()

    def _checked(self, direction: Vector) -> Vector | None:
        """Average over ranks if each has perturbed on its own, verify that all is finite, and clip."""
        try:
            direction = self._weights.average(direction)
            self._clip_(direction, "final")
            direction.require_finite()
        except NonFiniteError:
            return None
        return direction

    def _clip_(self, vector: Vector, moment: str) -> None:
        options = self._optimizer.options
        if options.max_norm is not None and options.clip == moment and vector.total_norm > options.max_norm:
            vector.scale_(options.max_norm / vector.total_norm)

    def _step_base(self) -> None:
        """Let the base optimizer step; if a hook raises after that, the step was taken all the same."""
        was_taken: list[bool] = []
        hooks: Any = self._optimizer.base._optimizer_step_post_hooks
        hooks[self] = lambda *_: was_taken.append(True)
        hooks.move_to_end(self, last=False)
        try:
            self._scale.step()
        finally:
            hooks.pop(self, None)
            if was_taken:
                mark_gradients(self._weights.params)
                self._complete(is_finite=True)

    def _complete(self, is_finite: bool) -> None:
        self._state = "closed"
        self._optimizer._complete(self._index + 1, is_finite=is_finite)
        self._optimizer._has_just_looped = self._is_loop

    def _leave(self) -> None:
        """Return from wherever the algorithm has moved to."""
        self._algorithm.close()
        self._close_context()
        if self._weights.are_moved:
            with torch.no_grad():
                self._weights.restore()

    def _close_context(self) -> None:
        if self._context is not None:
            context, self._context = self._context, None
            context.__exit__(None, None, None)

    def _undo(self) -> None:
        """Leave no trace of the step in gradients, buffers or the algorithm's state."""
        self._weights.clear_gradients()
        with torch.no_grad():
            self._buffers.undo()
        self._optimizer._rollback()

    def _run_hooks(self, hooks: dict[int, Any]) -> None:
        """Call the optimizer's step hooks, which torch runs around `step` only."""
        if self._is_loop:
            for hook in list(hooks.values()):
                hook(self._optimizer, (self._optimizer,), {})


def _context_of(optimizer: SharpnessAware) -> Callable[[], AbstractContextManager[Any]] | None:
    """Return what makes the context of an evaluation: DDP's ``no_sync`` if ranks perturb on their own."""
    if optimizer.options.perturbation != "local":
        return None
    no_sync: Callable[[], AbstractContextManager[Any]] | None = getattr(optimizer._model, "no_sync", None)
    if no_sync is None and optimizer.process_group is not None:
        raise ClosureError(
            "StepOptions(perturbation='local') needs model= to be the network as DistributedDataParallel wraps it: "
            "otherwise ranks exchange their gradients before they perturb."
        )
    return no_sync
