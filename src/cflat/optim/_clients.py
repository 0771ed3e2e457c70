"""What a foreign loop does to a step that cannot be seen from its gradients; nothing is imported for it."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from cflat._errors import ClosureError

if TYPE_CHECKING:
    from cflat.optim._base import SharpnessAware

_MAX_FRAMES = 8  # torch and LR schedulers put at most four between Accelerate's step and ours


def is_absent(closure: Any) -> bool:
    """Return whether there is no closure: None, or what Lightning's manual optimization passes in its place."""
    inner = closure.args[-1] if isinstance(closure, partial) and closure.args else closure
    return inner is None or getattr(inner, "__name__", "") == "do_nothing_closure"


def refuse_skipped_micro_batches(optimizer: SharpnessAware) -> None:
    """Raise if Accelerate calls with the last closure of an accumulation: those before it were never evaluated."""
    if "accelerate.optimizer" not in sys.modules:
        return
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
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
        if frame.f_back is None:
            return
        frame = frame.f_back
