"""Hugging Face Trainer: `FlatTrainer`, or `FlatSteps` mixed into a trainer of your own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from cflat.integrations._micro_batches import MicroBatches, flat_optimizer
from cflat.optim import SharpnessAware
from cflat.optim._callers import mark_gradients

_ADVICE = "Pass optimizers=(cflat.CFlatTurbo(torch.optim.AdamW(...), model=model), None) to the trainer."


class FlatSteps:
    """Mix in before a Trainer class: its training step then evaluates as often as the optimizer asks.

    ``gradient_accumulation_steps`` works as usual: micro-batches are kept and evaluated again. ``max_grad_norm`` clips
    the direction of the step, as ``StepOptions(max_norm=...)`` does, and the logged ``grad_norm`` is that direction's;
    the logged loss is that of the first evaluation.
    """

    _micro_batches: MicroBatches | None = None

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Evaluate a micro-batch; with the last one of a step, take the step."""
        trainer: Any = self
        optimizer = flat_optimizer(trainer.optimizer, _ADVICE)
        if self._micro_batches is None or self._micro_batches.optimizer is not optimizer:
            self._prepare(optimizer)
            self._micro_batches = MicroBatches(optimizer, lambda: trainer.accelerator.no_sync(model=model))

        def evaluate(inputs: dict[str, Any]) -> Tensor:
            # super() without arguments would take `inputs`, the first argument of this function, for the instance.
            loss: Tensor = super(FlatSteps, trainer).training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
            return loss

        is_last = trainer.accelerator.sync_gradients
        loss: Tensor = (self._micro_batches.step if is_last else self._micro_batches.accumulate)(evaluate, inputs)
        return loss

    def _prepare(self, optimizer: SharpnessAware) -> None:
        """Take over the trainer's clipping, which would come after the step."""
        trainer: Any = self
        if trainer.accelerator.scaler is not None:
            raise ValueError("fp16=True scales the loss out of reach of the optimizer. Use bf16=True.")
        # 0 switches the trainer's clipping off.
        limit, own = trainer.args.max_grad_norm or None, optimizer.options.max_norm
        if limit and own and limit != own:
            raise ValueError(f"max_grad_norm is {limit} and StepOptions(max_norm=...) is {own}. Give one of them.")
        optimizer.options = replace(optimizer.options, max_norm=limit or own)
        trainer.add_callback(_KnowsClipping)


class _KnowsClipping(TrainerCallback):  # type: ignore[misc]
    """Between the step and ``optimizer.step()`` the trainer clips once more, which changes versions but no values."""

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        mark_gradients(flat_optimizer(optimizer, _ADVICE).all_params())


class FlatTrainer(FlatSteps, Trainer):  # type: ignore[misc]
    """A Trainer for the optimizers of cflat."""
