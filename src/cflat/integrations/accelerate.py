"""Hugging Face Accelerate: steps that see all micro-batches of an accumulation.

Without this, Accelerate calls ``step(closure)`` on the last micro-batch only; the optimizer rejects that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from cflat.integrations._micro_batches import MicroBatches, flat_optimizer


class FlatSteps:
    """Evaluate one micro-batch per call, and step when Accelerate reports complete gradients.

    Call it inside ``accelerator.accumulate(model)``, in place of ``accelerator.backward`` and ``optimizer.step``; both
    ``optimizer.step()`` and ``optimizer.zero_grad()`` may still follow and do no harm. Clip with
    ``StepOptions(max_norm=...)``: a clip after the call comes too late and raises at ``optimizer.step()``.

    Args:
        accelerator: Has prepared the model and the optimizer.
        model: The prepared model.
        optimizer: The prepared optimizer, which wraps one of cflat.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> None:
        if accelerator.scaler is not None:
            raise ValueError(
                "mixed_precision='fp16' scales the loss inside Accelerate, out of reach of the optimizer. Use 'bf16', "
                "or loop over optimizer.optimizer.passes(scaler=accelerator.scaler) and update the scaler yourself."
            )
        self.accelerator = accelerator
        flat = flat_optimizer(optimizer, "Wrap your torch optimizer before accelerator.prepare().")
        self._micro_batches = MicroBatches(flat, lambda: accelerator.no_sync(model))

    def __call__(self, compute_loss: Callable[..., Tensor], batch: Any, *more: Any) -> Tensor:
        """Evaluate one micro-batch, whose loss is ``compute_loss(batch, *more)``; return its first loss."""

        def evaluate(batch: Any, *more: Any) -> Tensor:
            loss = compute_loss(batch, *more)
            self.accelerator.backward(loss)
            return loss.detach()

        is_last = self.accelerator.sync_gradients  # false until the last micro-batch of a step, or of the data
        loss: Tensor = (self._micro_batches.step if is_last else self._micro_batches.accumulate)(evaluate, batch, *more)
        return loss
