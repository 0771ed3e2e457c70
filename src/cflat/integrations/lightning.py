"""PyTorch Lightning: a callback that starts the task, logs telemetry and makes gradient accumulation exact.

The module stays as it is: automatic optimization passes its closure to ``step``, which evaluates it as often as needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
except ImportError:  # the same code under its older name
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature

from torch import Tensor

from cflat._errors import ClosureError
from cflat.integrations._micro_batches import MicroBatches
from cflat.optim import SharpnessAware


class FlatCallback(Callback):  # type: ignore[misc]
    """Add to the trainer's callbacks; needed for accumulation and for true logs, good for telemetry.

    What ``training_step`` logs and returns is that of a step's first evaluation; further ones are silent.

    Args:
        task: Position of the task in the stream; set it before the next ``fit``.
        num_tasks: Length of the stream, if it is known.
        log_every_n_steps: How often telemetry is logged under ``cflat/``; 0 for never.
    """

    def __init__(self, task: int = 0, num_tasks: int | None = None, log_every_n_steps: int = 1) -> None:
        self.task = task
        self.num_tasks = num_tasks
        self.log_every_n_steps = log_every_n_steps
        self._handles: list[Any] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the optimizer and begin the task, unless a checkpoint has brought us into the middle of it."""
        optimizer = self.optimizer = _optimizer_of(trainer)
        if trainer.ckpt_path is None or optimizer.task_index != self.task:
            optimizer.start_task(self.task, self.num_tasks)
        self._module = pl_module
        self._num_steps = optimizer.telemetry.steps
        # Strategies with one device have no gradients to hold back, and no `block_backward_sync`.
        self._micro_batches = MicroBatches(optimizer, getattr(trainer.strategy, "block_backward_sync", nullcontext))
        if pl_module.automatic_optimization:
            self._handles = [optimizer.register_step_pre_hook(self._extend_step)]
            optimizer._step_supports_amp_scaling = False  # without a scaler, Lightning may clip as with any optimizer

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the micro-batch, in case that others follow before the step."""
        if pl_module.automatic_optimization:
            self._micro_batches.keep(_evaluate, trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log the telemetry of a step."""
        telemetry = self.optimizer.telemetry
        if telemetry.steps == self._num_steps:
            return
        self._num_steps = telemetry.steps
        self._micro_batches.clear()
        if self.log_every_n_steps and telemetry.steps % self.log_every_n_steps == 0:
            numbers = {name: float(value) for name, value in telemetry.last.items() if isinstance(value, int | float)}
            numbers["evaluations_per_step"] = telemetry.evaluations_per_step
            pl_module.log_dict({f"cflat/{name}": value for name, value in numbers.items()})

    def on_train_end(self, *_: Any) -> None:
        """Leave the optimizer as it was."""
        while self._handles:
            self._handles.pop().remove()
            self.optimizer.__dict__.pop("_step_supports_amp_scaling", None)

    on_exception = on_train_end

    def _extend_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the closure that Lightning hands to ``step`` by one that is silent after its first call."""
        self._micro_batches.drop_last()  # the closure itself evaluates the last one
        closure: Callable[[], Any] = args[1]
        inner = closure.args[-1]  # type: ignore[attr-defined]  # precision plugins wrap the loop's closure in a partial
        results: list[Any] = []

        def evaluate() -> Any:
            with _silenced(self._module) if results else nullcontext():
                loss = closure()
            results.append(inner._result)
            # Lightning consumes the result after the step and passes it to on_train_batch_end().
            inner._result = results[0]
            return loss

        def replay(index: int) -> None:
            with _silenced(self._module):
                self._micro_batches.replay(index)

        return (args[0], evaluate), {**kwargs, "replay": replay}


def _evaluate(trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
    """Do for one micro-batch what Lightning's own closure does."""
    takes_index = is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2)  # as Lightning decides
    output = trainer.strategy.training_step(*((batch, batch_idx) if takes_index else (batch,)))
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    trainer.strategy.backward(loss / trainer.accumulate_grad_batches, trainer.strategy.optimizers[0])


def _optimizer_of(trainer: Trainer) -> SharpnessAware:
    found = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, SharpnessAware)]
    if len(found) != 1:
        raise ClosureError(
            f"FlatCallback needs one optimizer of cflat, found {len(found)} among {len(trainer.optimizers)}. Return it "
            "from configure_optimizers(), wrapped around your torch optimizer."
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ClosureError("precision='16-mixed' scales the loss out of reach of the optimizer. Use 'bf16-mixed'.")
    return found[0]


@contextmanager
def _silenced(module: LightningModule) -> Iterator[None]:
    """Let the module's ``log`` and ``log_dict`` do nothing."""
    # log_dict() calls log() for each entry, so that one patch silences both.
    module.__dict__["log"] = lambda *_, **__: None
    try:
        yield
    finally:
        del module.__dict__["log"]
