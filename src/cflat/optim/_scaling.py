"""Loss scaling for float16: what a step has to do when the user's closure scales its loss with a GradScaler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from cflat._errors import ClosureError

if TYPE_CHECKING:
    from cflat.optim._base import SharpnessAware
    from cflat.optim._vectors import Vector


class LossScale:
    """The factor by which one step's gradients are too large, and the scaler that must be notified of the outcome.

    The factor stays on the device, so that it costs no host read. It is None without a GradScaler, or with one that is
    disabled.
    """

    def __init__(self, scaler: Any, optimizer: SharpnessAware) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._owners = (optimizer, optimizer.base)

    @property
    def value(self) -> Tensor | None:
        """The factor, after each evaluation; raises if gradients were unscaled by hand."""
        if self._scaler is None:
            return None
        # A defaultdict: looking up an optimizer that was never unscaled would add an entry.
        states = self._scaler._per_optimizer_states
        if any(states[id(o)]["stage"] is OptState.UNSCALED for o in self._owners if id(o) in states):
            raise ClosureError(
                "scaler.unscale_() was called inside a step, which unscales its gradients itself. Leave it out; "
                "to clip, pass options=StepOptions(max_norm=...)."
            )
        scale: Tensor | None = self._scaler._get_scale_async()  # get_scale() would wait for the device
        return scale  # None if the loss was not scaled at all

    def apply_(self, direction: Vector) -> Vector:
        """Scale the direction, because the scaler unscales what it steps; exact, as scales are powers of two."""
        scale = self.value
        return direction if scale is None or not direction.tensors else direction.mul_by_(scale)

    def step(self, base: Optimizer) -> None:
        """Let the base optimizer take over the gradients, which hold a direction that `apply_` has scaled."""
        if self._scaler is None:
            base.step()
        else:
            self._scaler.step(base)

    def report_overflow(self, base: Optimizer, params: Sequence[Tensor]) -> None:
        """Show the scaler an Inf so that it backs off; nothing is stepped."""
        # The scaler sees no Inf in a parameter without elements.
        visible = next((param for param in params if param.numel() > 0), None)
        if self._scaler is not None and visible is not None:
            visible.grad = torch.full_like(visible, float("inf"))
            self._scaler.step(base)
            visible.grad = None
