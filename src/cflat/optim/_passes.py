"""The engine of a step: hand the user one evaluation after the other until the algorithm has its direction."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch._compile import _disable_dynamo  # torch.compiler.disable, without importing the compiler at once
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from cflat._errors import ClosureError
from cflat.optim._callers import mark_gradients, total_magnitude, with_foreign_gradient
from cflat.optim._scaling import LossScale
from cflat.optim._vectors import LeftoverError, NonFiniteError, Vector

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

    Made by `SharpnessAware.passes`; ``is_loop`` says that the caller loops itself, so that hooks, which torch runs
    around `step` only, have to run here.
    """

    _state = "new"
    _context: ExitStack | None = None  # of the evaluation that is under way

    def __init__(
        self, optimizer: SharpnessAware, scaler: Any = None, *, accumulated: bool = False, is_loop: bool = True
    ) -> None:
        self._optimizer = optimizer
        self._scale = LossScale(scaler, optimizer)
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

    @_disable_dynamo  # a graph that was traced through moves and decisions would be wrong
    def __next__(self) -> int:
        """Prepare the next evaluation and return its index, or finish the step."""
        if self._state == "interrupted":
            raise ClosureError(
                "This step was rolled back because another call on the optimizer interrupted its passes(); the weights "
                "are restored. Call state_dict(), step() and start_task() outside the loop."
            )
        if self._state == "closed":
            raise StopIteration
        if self._state == "new":
            self._run_hooks(_global_optimizer_pre_hooks, self._optimizer._optimizer_step_pre_hooks)
        has_gradients = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # as torch.no_grad() does, in a hundredth of its time
        try:
            if self._state == "open":
                self._advance()
            else:
                self._start()
        except LeftoverError:
            self.close()
            raise ClosureError(
                f"{type(self._optimizer).__name__} found gradients that were accumulated before this step, which it "
                "would have to drop: it needs all micro-batches again at other weights. Loop over the micro-batches "
                "inside the closure or inside optimizer.passes(), or keep them with cflat.integrations, which serves "
                "Lightning, Trainer, Accelerate and trainers of your own. If these gradients are left over, call "
                "optimizer.zero_grad() before the step."
            ) from None
        except BaseException:
            self.close()
            raise
        finally:
            torch._C._set_grad_enabled(has_gradients)
        torch.clear_autocast_cache()  # of weights that have moved since they were cast
        if self._state == "closed":
            self._run_hooks(self._optimizer._optimizer_step_post_hooks, _global_optimizer_post_hooks)
            raise StopIteration
        self._index += 1
        if self._new_context is not None:
            self._context = ExitStack()
            self._context.enter_context(self._new_context())
        return self._index

    def close(self, interrupted: bool = False) -> None:
        """Roll the step back: put weights, buffers, random numbers and the algorithm's state back."""
        if self._state == "open":
            self._leave()
            self._optimizer._random.undo()
            self._undo()
            torch.clear_autocast_cache()
        if self._state in ("new", "open"):
            self._state = "interrupted" if interrupted else "closed"

    def _start(self) -> None:
        """Ask the algorithm where it wants its first gradient."""
        optimizer = self._optimizer
        # First, since it may raise and nothing has to be rolled back yet.
        self._new_context = _context_of(optimizer)
        self._weights = optimizer._open(self)
        optimizer._buffers.start()
        optimizer._random.start({param.device for param in self._weights.candidates if not param.is_cpu})
        self._algorithm = optimizer.direction(self._weights)
        self._state = "open"  # from here on there is something to roll back
        # Runs to the first yield, where some optimizers have moved already; `_settle_gradients` has to know.
        self._asked = next(self._algorithm)
        self._settle_gradients()

    def _settle_gradients(self) -> None:
        """Keep gradients that begin the first evaluation, and note others that nobody has accounted for."""
        weights, is_accumulated = self._weights, not self.replays
        foreign = with_foreign_gradient(weights.candidates)
        adds = self._optimizer._adds_to_gradients
        # Gradients accumulated at theta can only begin an evaluation at theta; MSAM's, for one, is elsewhere.
        if foreign and (is_accumulated or adds) and not weights.are_moved:
            # What the last step has left elsewhere would be counted as part of this gradient.
            for param in set(weights.candidates) - set(foreign):
                param.grad = None
            return
        self.replays = True
        if foreign and not is_accumulated:  # they are zero, or lost: found out when the first norm is read
            weights.leftover = total_magnitude(foreign)
        elif weights.group is not None:  # all ranks read as many numbers
            weights.leftover = torch.zeros((), device=weights.candidates[0].device)
        weights.clear_gradients()

    def _advance(self) -> None:
        self._close_context()
        is_done, direction = self._ask()
        if is_done:
            self._finish(direction)
        else:
            self._optimizer._buffers.hold()
            self._optimizer._random.replay()
            self.replays = True

    def _ask(self) -> tuple[bool, Vector | None]:
        """Give the algorithm its gradient; return whether it is done, and its direction unless it met Inf or NaN."""
        try:
            gradient = self._collect()
            if not gradient.tensors:  # no parameter takes part in this step
                return True, gradient
            if self._optimizer._gradient_hooks:
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
        has_gradient = any(param.grad is not None for param in params)
        if not has_gradient and any(param.requires_grad for param in params):  # in order only if all are frozen
            raise ClosureError(
                f"Evaluation {self._index + 1} of this step left no gradient in any parameter of the optimizer. Call "
                "loss.backward() in every evaluation, on a loss that depends on these parameters."
            )
        if self._index == 0:
            self._weights.restore()  # which parameters are moved from here on is decided by this gradient
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
            # Back to before the first evaluation: its forward pass has spoiled running statistics if inputs were NaN.
            self._undo()
            self._scale.report_overflow(optimizer.base, self._weights.params)
            self._complete(is_finite=False)
        else:
            optimizer._buffers.release()
            self._weights.assign(self._scale.apply_(direction))
            self._step_base()

    def _step_base(self) -> None:
        """Let the base optimizer step; if a hook raises after that, the step was taken all the same."""
        base = self._optimizer.base
        was_taken: list[bool] = []
        hooks: Any = base._optimizer_step_post_hooks
        hooks[self] = lambda *_: was_taken.append(True)
        # Before the user's hooks, so that it has run if one of them raises.
        hooks.move_to_end(self, last=False)
        try:
            self._scale.step(base)
        finally:
            hooks.pop(self, None)
            if was_taken:
                mark_gradients(self._weights.params)
                self._complete(is_finite=True)

    def _complete(self, is_finite: bool) -> None:
        self._state = "closed"
        self._optimizer._complete(self._index + 1, is_finite=is_finite)
        self._optimizer._has_just_looped = self._is_loop

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

    def _leave(self) -> None:
        """Return from wherever the algorithm has moved to."""
        self._algorithm.close()
        self._close_context()
        if self._weights.are_moved:
            with torch.no_grad():
                self._weights.restore()

    def _close_context(self) -> None:
        if self._context is not None:
            self._context.close()

    def _undo(self) -> None:
        """Leave no trace of the step in gradients, buffers or the algorithm's state."""
        self._weights.clear_gradients()
        with torch.no_grad():
            self._optimizer._buffers.undo()
        self._optimizer._rollback()

    def _run_hooks(self, *tables: Any) -> None:
        """Call step hooks, the optimizer's and those of all optimizers, which torch runs around `step` only."""
        if self._is_loop:
            for hook in [hook for table in tables for hook in table.values()]:
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
