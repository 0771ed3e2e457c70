"""What callers do around a step that would lose gradients without a sound; each is refused with a way out.

Nothing is imported for the loops of others: what they do is seen from their frames and from the gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from itertools import islice
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cflat._errors import ClosureError

if TYPE_CHECKING:
    from cflat.optim._base import SharpnessAware

_MAX_FRAMES = 8  # torch and LR schedulers put at most four between Accelerate's step and ours
_MARK = "_cflat_version"


def is_absent(closure: Any) -> bool:
    """Return whether there is no closure: None, or what Lightning's manual optimization passes in its place."""
    inner = closure.args[-1] if isinstance(closure, partial) and closure.args else closure
    return inner is None or getattr(inner, "__name__", "") == "do_nothing_closure"


def refuse_scaler(optimizer: SharpnessAware) -> None:
    """Raise if it is a GradScaler that is calling ``optimizer.step``, since its gradients are scaled."""
    if not hasattr(optimizer, "found_inf"):
        return
    for name in ("found_inf", "grad_scale"):  # what the scaler left behind would refuse the next, right call as well
        delattr(optimizer, name)
    raise ClosureError(
        f"GradScaler.step({type(optimizer).__name__}, ...) cannot drive an optimizer that evaluates several times. "
        "Write optimizer.step(closure, scaler=scaler), then scaler.update()."
    )


def refuse_skipped_micro_batches(optimizer: SharpnessAware) -> None:
    """Raise if Accelerate calls with the last closure of an accumulation: those before it were never evaluated."""
    if "accelerate.optimizer" not in sys.modules:
        return
    for frame, _ in islice(walk_stack(sys._getframe(1)), _MAX_FRAMES):
        caller: Any = frame.f_locals.get("self") if frame.f_globals.get("__name__") == "accelerate.optimizer" else None
        if getattr(caller, "optimizer", None) is optimizer:
            num_steps = caller.gradient_state.num_steps
            if num_steps > 1:
                raise ClosureError(
                    f"Accelerate accumulates over {num_steps} micro-batches and passes on only the last closure, so "
                    "the data of the others would be lost. Use cflat.integrations.accelerate.FlatSteps, or loop over "
                    "optimizer.optimizer.passes()."
                )
            return


def refuse_late_changes(params: Iterable[Tensor]) -> None:
    """Raise if gradients were changed after the step that has used them."""
    if holds_foreign_gradient(params):
        raise ClosureError(
            "Gradients were changed after the loop over passes(), which has stepped already: the change would have no "
            "effect. To clip, pass options=StepOptions(max_norm=...); call backward inside the loop only."
        )


def mark_gradients(params: Iterable[Tensor]) -> None:
    """Note on each gradient that this step has left it, as it is now."""
    for gradient in _gradients(params):
        setattr(gradient, _MARK, gradient._version)


def holds_foreign_gradient(params: Iterable[Tensor]) -> bool:
    """Return whether some gradient is neither empty, nor zero, nor what a step has left."""
    return any(
        _is_nonzero(gradient) for gradient in _gradients(params) if getattr(gradient, _MARK, None) != gradient._version
    )


def _gradients(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that backward writes to: of a DTensor, this rank's shard."""
    gradients = [param.grad for param in params if param.grad is not None]
    return [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]


def _is_nonzero(gradient: Tensor) -> bool:
    return bool((gradient._values() if gradient.layout is torch.sparse_coo else gradient).count_nonzero())
