"""What callers do around a step that would lose gradients silently; each raises with a way out.

Nothing is imported for foreign loops: what they do is seen from the gradients and, in one case, from their frames.
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
from cflat.optim._vectors import as_real, stack_scalars

if TYPE_CHECKING:
    from cflat.optim._base import SharpnessAware

_MAX_FRAMES = 8  # torch and LR schedulers put at most four between Accelerate's step and ours
# Backward either makes a new tensor, without this attribute, or writes in place, which raises the version.
_MARK = "_cflat_version"


def is_absent(closure: Any) -> bool:
    """Return whether there is no closure: None, or what Lightning's manual optimization passes in its place."""
    inner = closure.args[-1] if isinstance(closure, partial) and closure.args else closure
    return inner is None or getattr(inner, "__name__", "") == "do_nothing_closure"


def reject_scaler(optimizer: SharpnessAware) -> None:
    """Raise if it is a GradScaler that is calling ``optimizer.step``, since its gradients are scaled."""
    if not hasattr(optimizer, "found_inf"):
        return
    for name in ("found_inf", "grad_scale"):  # what the scaler left behind would reject the next, right call as well
        delattr(optimizer, name)
    raise ClosureError(
        f"GradScaler.step({type(optimizer).__name__}, ...) cannot drive an optimizer that evaluates several times. "
        "Write optimizer.step(closure, scaler=scaler), then scaler.update()."
    )


def reject_skipped_micro_batches(optimizer: SharpnessAware) -> None:
    """Raise if Accelerate calls with the last closure of an accumulation: those before it were never evaluated.

    Looks at the callers' frames, because those who need it have not imported our integration, and because Accelerate's
    count of micro-batches is global: a step of somebody else's must pass.
    """
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


def reject_late_changes(params: Iterable[Tensor]) -> None:
    """Raise if gradients were changed after the step that has used them."""
    changed = with_foreign_gradient(params)
    # zero_grad(set_to_none=False) also changes gradients, but zeros lose nothing.
    if changed and float(total_magnitude(changed)) != 0.0:
        raise ClosureError(
            "Gradients were changed after the loop over passes(), which has stepped already: the change would have no "
            "effect. To clip, pass options=StepOptions(max_norm=...); call backward inside the loop only."
        )


def mark_gradients(params: Iterable[Tensor]) -> None:
    """Note on each gradient that this step has left it, as it is now."""
    for param in params:
        if param.grad is not None:
            gradient = _written(param.grad)
            setattr(gradient, _MARK, gradient._version)


def with_foreign_gradient(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters whose gradient is not what a step has left there."""
    found = []
    for param in params:
        if param.grad is not None:
            gradient = _written(param.grad)
            if getattr(gradient, _MARK, None) != gradient._version:
                found.append(param)
    return found


def total_magnitude(params: Iterable[Tensor]) -> Tensor:
    """Return a scalar on the device that is 0 if all gradients are."""
    gradients = [_written(param.grad).detach() for param in params if param.grad is not None]
    values = [as_real(g._values() if g.layout is torch.sparse_coo else g) for g in gradients]
    return stack_scalars(torch._foreach_norm(values, 1)).sum()


def _written(gradient: Tensor) -> Tensor:
    """Return the tensor that backward writes to: of a DTensor, this rank's shard."""
    return gradient if type(gradient) is Tensor else getattr(gradient, "_local_tensor", gradient)
