"""Micro-batches that a foreign loop has evaluated before the step: keep them, to evaluate them again elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.optim import Optimizer

from cflat._errors import ClosureError
from cflat.optim import SharpnessAware
from cflat.optim._guards import RandomGuard


class MicroBatches:
    """The evaluations that lead up to one step, each with the random numbers that it draws.

    The gradients that they accumulate are the beginning of the step's first evaluation, so nothing is computed twice;
    in further evaluations they are computed again, at other weights, with the same dropout masks.

    Args:
        optimizer: Whose step it is.
        unsynced: Makes the context for all but the last micro-batch, in which ranks do not exchange gradients.
    """

    def __init__(
        self, optimizer: SharpnessAware, unsynced: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self.optimizer = optimizer
        self._unsynced = unsynced
        self._earlier: list[tuple[Callable[[], Any], RandomGuard]] = []

    def keep(self, evaluate: Callable[[], Any]) -> None:
        """Remember how to evaluate a micro-batch, before it is evaluated for the first time."""
        if not self._earlier:
            self.optimizer.begin_step()
        self._earlier.append((evaluate, self._random_numbers()))

    def accumulate(self, evaluate: Callable[[], Any]) -> Any:
        """Evaluate a micro-batch that is not the last one of its step."""
        if not self._earlier:
            self.optimizer.zero_grad()
        self.keep(evaluate)
        return evaluate()

    def step(self, evaluate: Callable[[], Any]) -> Any:
        """Step with the last micro-batch; return what its first evaluation returned."""
        result = None
        try:
            with self.optimizer.passes(accumulated=True) as passes:
                for index in passes:
                    if passes.replays:
                        self.replay()
                    value = evaluate()
                    result = value if index == 0 else result
        finally:
            self.clear()
        return result

    def replay(self) -> None:
        """Evaluate all kept micro-batches again; random numbers go on afterwards from where they are now."""
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
        """Forget all micro-batches: their step is done, or given up."""
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
