"""The engine of a step: hand the user one evaluation after the other until the algorithm has its direction."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from cflat._errors import ClosureError
from cflat.optim._callers import holds_foreign_gradient, mark_gradients
from cflat.optim._scaling import LossScale
from cflat.optim._vectors import NonFiniteError, Vector
from cflat.optim._weights import Weights

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

    A step that is left before its end is given up, and all is as if it had never begun: weights, buffers, random
    numbers and the algorithm's state. An exception inside ``with opt.passes() as passes:`` does so at once; without
    ``with`` it happens when the iterator is closed or dropped, or at the next call on the optimizer.

    Made by `SharpnessAware.passes`; ``is_loop`` says that the caller loops itself, so that hooks, which torch runs
    around `step` only, have to run here.
    """

    def __init__(
        self, optimizer: SharpnessAware, scaler: Any = None, *, accumulated: bool = False, is_loop: bool = True
    ) -> None:
        self._state = "new"
        self._optimizer = optimizer
        self._scale = LossScale(scaler, optimizer)
        self._weights = Weights(optimizer.all_params(), optimizer.process_group)
        self._algorithm: Direction | None = None
        self._context = ExitStack()  # of the evaluation that is under way
        self._index = -1
        self._asked: str | None = None
        self._is_loop = is_loop
        self.loss: Any = None
        self.replays = not accumulated
        """Whether this evaluation must compute again what was accumulated before the step began."""

    def __iter__(self) -> Passes:
        return self

    def __enter__(self) -> Passes:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        was_not_looped_over = self._state in ("new", "begun")
        self.close()
        if was_not_looped_over and kind is None:
            raise ClosureError(
                "`with optimizer.passes() as passes:` was left without its loop, so no step was taken. Write "
                "`for _ in passes:` inside it, and compute the loss and call backward in that loop."
            )

    def __del__(self) -> None:
        if self._state in ("begun", "open"):
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
            if self._state == "open":
                self._advance()
            else:
                self._start()
        except BaseException:
            self.close()
            raise
        if self._state == "closed":
            self._run_hooks(self._optimizer._optimizer_step_post_hooks)
            raise StopIteration
        self._index += 1
        self._context.enter_context(self._new_context())
        return self._index

    def close(self, interrupted: bool = False) -> None:
        """Give the step up: put weights, buffers, random numbers and the algorithm's state back."""
        if self._state in ("begun", "open"):
            self._leave()
            self._optimizer._random.undo()
            self._undo()
        if self._state in ("new", "begun", "open"):
            self._state = "interrupted" if interrupted else "closed"

    def begin(self) -> None:
        """Move to where the first gradient is taken."""
        optimizer = self._optimizer
        optimizer._open(self)
        self._state = "begun"
        with torch.no_grad():
            optimizer._buffers.start()
            optimizer._random.start(param.device for param in self._weights.candidates)
            self._algorithm = optimizer.direction(self._weights)
            self._asked = next(self._algorithm)

    def go_on(self, scaler: Any, is_loop: bool) -> Passes:
        """Return self, to be looped over after gradients were accumulated where the step had begun."""
        self._scale, self._is_loop = LossScale(scaler, self._optimizer), is_loop
        return self

    def _start(self) -> None:
        optimizer, was_begun = self._optimizer, self._state == "begun"
        has_gradients = holds_foreign_gradient(self._weights.candidates)
        if has_gradients and self.replays and not optimizer._adds_to_gradients:
            raise ClosureError(
                f"{type(optimizer).__name__} found gradients that were accumulated before this step, which it would "
                "have to drop: it needs all micro-batches again at other weights. Loop over the micro-batches inside "
                "the closure or inside optimizer.passes(), or keep them with cflat.integrations, which serves "
                "Lightning, Trainer, Accelerate and trainers of your own. If these gradients are left over, call "
                "optimizer.zero_grad() before the step."
            )
        self._run_hooks(optimizer._optimizer_step_pre_hooks)
        if was_begun:  # the numbers of the micro-batches before are replayed by whoever kept them
            optimizer._random.start(param.device for param in self._weights.candidates)
        else:
            self.begin()
        self._state = "open"
        self._new_context = _contexts_of(optimizer)
        if not has_gradients:
            self._weights.clear_gradients()
            self.replays = True
        elif self._weights.are_moved and not was_begun:
            raise ClosureError(
                f"{type(optimizer).__name__} takes its first gradient at other weights than those at which gradients "
                "were accumulated before this step. Call optimizer.begin_step() before the first micro-batch, or loop "
                "over all micro-batches inside the closure or inside optimizer.passes()."
            )

    @torch.no_grad()
    def _advance(self) -> None:
        self._context.close()
        is_done, direction = self._ask()
        if is_done:
            self._finish(direction)
        else:
            self._optimizer._buffers.hold()
            self._optimizer._random.replay()
            self.replays = True

    def _ask(self) -> tuple[bool, Vector | None]:
        """Give the algorithm its gradient; return whether it is done, and its direction unless it met Inf or NaN."""
        assert self._algorithm is not None
        try:
            gradient = self._collect()
            if not gradient.tensors:  # no parameter takes part in this step
                return True, gradient
            for hook in list(self._optimizer._gradient_hooks.values()):
                hook(Evaluation(self._asked, gradient, self.loss))
            self._asked = self._algorithm.send(gradient)
        except StopIteration as stop:
            return True, stop.value
        except NonFiniteError:
            return True, None
        return False, None

    def _collect(self) -> Vector:
        params = self._weights.candidates
        is_missing = all(param.grad is None for param in params)
        if is_missing and any(param.requires_grad for param in params):  # in order only if all are frozen
            raise ClosureError(
                f"Evaluation {self._index + 1} of this step left no gradient in any parameter of the optimizer. Call "
                "loss.backward() in every evaluation, on a loss that depends on these parameters."
            )
        gradient = self._weights.collect(self._scale.value)
        self._clip_(gradient, "each")
        return gradient

    def _finish(self, direction: Vector | None) -> None:
        """Apply the direction, or skip the step if there is none that is finite."""
        self._leave()
        optimizer = self._optimizer
        optimizer._random.release()  # a skipped step has consumed its random numbers, too
        if direction is not None:
            direction = self._checked(direction)
        if direction is None:
            self._undo()
            self._scale.report_overflow(optimizer.base, self._weights.params)
        else:
            optimizer._buffers.release()
            self._weights.assign(self._scale.apply_(direction))
            self._scale.step(optimizer.base)
            mark_gradients(self._weights.params)
        self._state = "closed"
        optimizer._complete(self._index + 1, is_finite=direction is not None)
        optimizer._has_just_looped = self._is_loop

    def _checked(self, direction: Vector) -> Vector | None:
        """Average over ranks if each has perturbed on its own, verify that all is finite, and clip."""
        try:
            if self._optimizer.options.perturbation == "local":
                direction.average_()
            if not direction.is_finite:
                _ = direction.norm
            self._clip_(direction, "final")
        except NonFiniteError:
            return None
        return direction

    def _clip_(self, vector: Vector, moment: str) -> None:
        options = self._optimizer.options
        if options.max_norm is not None and options.clip == moment and vector.agreed_norm > options.max_norm:
            vector.scale_(options.max_norm / vector.agreed_norm)

    def _leave(self) -> None:
        """Return from wherever the algorithm has moved to."""
        if self._algorithm is not None:
            self._algorithm.close()
        self._context.close()
        with torch.no_grad():
            self._weights.restore()

    def _undo(self) -> None:
        """Leave no trace of the step in gradients, buffers or the algorithm's state."""
        self._weights.clear_gradients()
        with torch.no_grad():
            self._optimizer._buffers.undo()
        self._optimizer._rollback()

    def _run_hooks(self, hooks: dict[int, Any]) -> None:
        """Call the optimizer's step hooks, which torch runs around `step` only."""
        if self._is_loop:
            for hook in list(hooks.values()):
                hook(self._optimizer, (self._optimizer,), {})


def _contexts_of(optimizer: SharpnessAware) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes the context of an evaluation: DDP's ``no_sync`` if ranks perturb on their own."""
    if optimizer.options.perturbation != "local":
        return nullcontext
    no_sync: Callable[[], AbstractContextManager[Any]] | None = getattr(optimizer._model, "no_sync", None)
    if no_sync is None and optimizer.process_group is not None:
        raise ClosureError(
            "StepOptions(perturbation='local') needs model= to be the network as DistributedDataParallel wraps it: "
            "otherwise ranks exchange their gradients before they perturb."
        )
    return no_sync or nullcontext
