"""PILOT, PyCIL and other code written for INFTY: its ``set_closure`` and ``step()`` in front of our optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cflat._errors import ClosureError
from cflat.optim import SharpnessAware

LossFunction: TypeAlias = Callable[[], tuple[Any, Sequence[Tensor]]]
"""What PILOT's ``create_loss_fn(inputs, targets)`` returns: a function that gives logits and a list of losses."""


def as_closure(loss_fn: LossFunction) -> Callable[[], tuple[Any, Sequence[Tensor]]]:
    """Turn INFTY's loss function into torch's closure: sum the losses, call backward, return both as they came."""

    def closure() -> tuple[Any, Sequence[Tensor]]:
        logits, losses = loss_fn()
        torch.stack(list(losses)).sum().backward()  # type: ignore[no-untyped-call]
        return logits, losses

    return closure


class InftyAdapter:
    """Give an optimizer of cflat the face that INFTY's learners call; everything else is the optimizer's own.

    ``optimizer = InftyAdapter(cflat.CFlatTurbo(base, model=network))`` in place of INFTY's ``C_Flat(...)``; schedulers
    take ``adapter.optimizer``.

    Args:
        optimizer: Any optimizer of cflat.
    """

    def __init__(self, optimizer: SharpnessAware) -> None:
        self.optimizer = optimizer
        self.name = type(optimizer).__name__
        self._closure: Callable[[], Any] | None = None

    def set_closure(self, loss_fn: LossFunction) -> None:
        """Take the loss function of the next step."""
        self._closure = as_closure(loss_fn)

    def step(self, closure: Callable[[], Any] | None = None, delay: bool = False) -> Any:
        """Step with the closure that was set; return logits and losses of its first evaluation."""
        if delay:
            raise ClosureError("delay=True leaves the step to the caller. Loop over optimizer.passes() instead.")
        # Forgotten after use: a second step() would silently train on the batch before.
        closure, self._closure = closure or self._closure, None
        if closure is None:
            raise ClosureError("Call InftyAdapter.set_closure(loss_fn) before every step().")
        return self.optimizer.step(closure)

    def post_process(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: what INFTY's optimizers keep for their plots is in ``telemetry`` here."""

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet while a copy is made, which asks for other names
            raise AttributeError(name)
        return getattr(self.optimizer, name)
