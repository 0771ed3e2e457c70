"""Micro-batches that a foreign loop has evaluated before the step: keep them, to evaluate them again elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.optim import Optimizer

from cflat._errors import ClosureError
from cflat.optim import SharpnessAware
from cflat.optim.engine import BufferGuard, RandomGuard


class MicroBatches:
    """The evaluations that lead up to one step, each with the random numbers that it draws.

    The gradients that they accumulate are the beginning of the step's first evaluation, so nothing is computed twice;
    in further evaluations they are computed again, at other weights, with the same dropout masks. `MSAM`, `AsyncSAM`
    and `RandomSAM`, whose only evaluation is not at the weights where they were accumulated, compute all of them again.

    If the step is skipped (Inf, NaN) or fails, the buffers of the model are put back to before the first micro-batch. A
    micro-batch whose evaluation raises is forgotten.

    A micro-batch is passed as arguments beside the function that evaluates it: a function that looks up a loop variable
    would see the newest batch when it is called again.

    Args:
        optimizer: Whose step it is.
        unsynced: Makes the context for all but the last micro-batch, in which ranks do not exchange gradients.
    """

    def __init__(
        self, optimizer: SharpnessAware, unsynced: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self.optimizer = optimizer
        self._unsynced = unsynced
        self._buffers = BufferGuard(optimizer.guarded_module)
        self._task_step = 0
        self._earlier: list[tuple[Callable[[], Any], RandomGuard]] = []

    def keep(self, evaluate: Callable[..., Any], batch: Any, *more: Any) -> None:
        """Remember how to evaluate a micro-batch, before it is evaluated for the first time."""
        if not self._earlier:
            self._buffers.start()
            self._task_step = self.optimizer.task_step
        self._earlier.append((lambda: evaluate(batch, *more), self._random_numbers()))

    def accumulate(self, evaluate: Callable[..., Any], batch: Any, *more: Any) -> Any:
        """Evaluate a micro-batch that is not the last one of its step."""
        if not self._earlier:
            # Otherwise backward would add to the direction that the last step has left in the gradients.
            self.optimizer.zero_grad()
        self.keep(evaluate, batch, *more)
        try:
            return evaluate(batch, *more)
        except BaseException:
            self.drop_last()  # its gradient is missing in the first evaluation, so further ones must not contain it
            raise

    def step(self, evaluate: Callable[..., Any], batch: Any, *more: Any) -> Any:
        """Step with the last micro-batch; return what its first evaluation returned."""
        result = None
        try:
            with self.optimizer.passes(accumulated=True) as passes:
                for index in passes:
                    if passes.replays:  # else the accumulated gradients are already those of this evaluation
                        self.replay(index)
                    value = evaluate(batch, *more)
                    result = value if index == 0 else result
        finally:
            # Also if the step fails: the next one must not replay its micro-batches.
            self.clear()
        return result

    def replay(self, index: int) -> None:
        """Evaluate all kept micro-batches again; random numbers continue afterwards from where they are now.

        Args:
            index: The evaluation of the step. In the first (0), buffers begin again where they were before the first
                micro-batch: each updates BatchNorm's statistics once.
        """
        if index == 0 and self._earlier:
            self._buffers.undo()
        present = self._random_numbers()
        for evaluate, random in self._earlier:
            random.replay()
            with self._unsynced():
                evaluate()
        present.undo()

    def drop_last(self) -> None:
        """Forget the micro-batch that was kept last."""
        self._earlier.pop()

    def clear(self) -> None:
        """Forget all micro-batches: their step is done, or rolled back, and then their traces in buffers are, too."""
        # The engine puts back what was there when the step began, after these micro-batches.
        if self._earlier and self.optimizer.task_step == self._task_step:  # steps that were taken are counted
            self._buffers.undo()
        self._earlier.clear()

    def _random_numbers(self) -> RandomGuard:
        guard = RandomGuard(self.optimizer.options.replay_rng)
        guard.start({param.device for param in self.optimizer.all_params()})
        return guard


def flat_optimizer(optimizer: Optimizer | None, advice: str) -> SharpnessAware:
    """Return the optimizer of this package inside a client's wrappers, or raise with advice."""
    found: Any = optimizer
    while found is not None and not isinstance(found, SharpnessAware):
        found = getattr(found, "optimizer", None)
    if found is None:
        raise ClosureError(f"Expected an optimizer of cflat, got {type(optimizer).__name__}. {advice}")
    return found  # type: ignore[no-any-return]
