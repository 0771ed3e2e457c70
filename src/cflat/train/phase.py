"""`ActivePhase`: one phase of a task while it is trained, and what a checkpoint within it holds."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from cflat.data import Batch, BatchLoader, Task
from cflat.methods import Method, Phase
from cflat.optim import SharpnessAware
from cflat.train.averaging import WeightAverage
from cflat.train.checkpoint import require_state_of, translate_load_errors
from cflat.train.meter import count_flops
from cflat.train.objective import Objective
from cflat.train.shards import optimizer_parts


@dataclass
class ActivePhase:
    """The optimizer, the data and the running sums of one phase.

    Whatever must survive a restart within the phase, besides the method itself, goes through `state_dict`.
    """

    task: Task
    phase: Phase
    num_epochs: int
    loader: BatchLoader
    optimizer: SharpnessAware
    objective: Objective
    average: WeightAverage | None = None
    """Of the trained weights, which it replaces when the phase ends."""

    def __post_init__(self) -> None:
        device = self.objective.runtime.device
        self.loss_sum: Tensor = torch.zeros((), dtype=torch.float64, device=device)
        """Loss of this epoch, summed over images; stays on the device, where adding to it does not wait."""
        self.flops: tuple[float, float] | None = None
        """Arithmetic of one preparation and of one evaluation; None until the first batch was inspected."""
        self._is_restored = False
        self._prepared: Batch | None = None
        self._modes: list[tuple[nn.Module, bool]] = []
        # A hook of the base: it runs after all evaluations, and not at all if the step is discarded.
        if self._overrides("before_update"):
            self.optimizer.base.register_step_pre_hook(self._edit_update)

    def set_train_mode(self) -> None:
        """Switch the network to the modes that the method trains it in."""
        method = self.objective.method
        if not self._modes or self._overrides("set_train_mode"):
            method.set_train_mode()
            self._modes = [(module, module.training) for module in method.network.modules()]
        # Finding out what is frozen walks all parameters: a tenth of a small step. Within a phase it does not change,
        # but evaluations between two steps leave the network in evaluation mode.
        for module, mode in self._modes:
            if module.training is not mode:
                module.training = mode

    def with_replay(self, batch: Batch, epoch: int, step: int) -> Batch:
        """Return the batch with the stored images that the method wants beside it."""
        if not self._overrides("replay"):
            return batch
        method, size = self.objective.method, batch.num_images
        wanted = method.replay(size, self.loader.replay_rng(epoch, step))
        for replay in wanted:
            if len(replay.images) != size:
                raise ValueError(
                    f"{type(method).__name__}.replay() must return {size} images in each set, got {len(replay.images)}."
                )
        loaded = (
            self.loader.load_replay(replay.images, replay.extras, epoch, step, number)
            for number, replay in enumerate(wanted)
        )
        return replace(batch, replay=tuple(loaded))

    def update(self, batch: Batch, prepared: Batch) -> Tensor:
        """Let the optimizer make a step, and everything that follows the weights step by step; return the loss."""
        objective, self._prepared = self.objective, prepared
        # The first step shows whether a loaded state is one.
        with translate_load_errors() if self._is_restored else nullcontext():
            loss = self.optimizer.step(objective.closure(prepared), scaler=objective.scaler)
        self._is_restored = False
        if objective.scaler is not None:
            objective.scaler.update()
        if self.average is not None:
            self.average.update()
        loss = objective.runtime.mean_over_ranks(loss)
        self.loss_sum += loss * batch.num_images
        # A discarded step has changed nothing, and what its evaluation returned may be Inf or NaN.
        if self._overrides("after_step") and not self.optimizer.telemetry.last.get("nonfinite"):
            with torch.no_grad():
                objective.method.after_step(objective.seen(batch))
        return loss

    def _edit_update(self, *_: Any) -> None:
        """Let the method edit what the base optimizer is about to apply."""
        runtime, prepared = self.objective.runtime, self._prepared
        assert prepared is not None, "update sets it before the optimizer steps"
        with torch.enable_grad(), runtime.sharing(prepared), runtime.autocast():
            self.objective.method.before_update(prepared)

    def _overrides(self, hook: str) -> bool:
        """Whether the method has a hook of its own; those of the base class do nothing."""
        return getattr(type(self.objective.method), hook) is not getattr(Method, hook)

    def inspect(self, batch: Batch, *, check_purity: bool = False) -> None:
        """Count the arithmetic of a prepared batch, and check on request that the loss is pure."""
        objective, method = self.objective, self.objective.method
        if check_purity:
            objective.check_purity(batch)
        method.eval()  # the counts are the same, and running statistics stay as they are
        counts = [count_flops(lambda: objective.prepare(batch)), count_flops(objective.closure(batch))]
        method.network.zero_grad()
        self.set_train_mode()
        # A filler repeats the image of another rank, whose work is counted there.
        own = torch.tensor([0.0, 0.0] if batch.is_filler else counts, dtype=torch.float64)
        per_step, per_evaluation = objective.runtime.sum_over_ranks(own).tolist()
        self.flops = (per_step, per_evaluation)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint between two steps must hold."""
        scaler = self.objective.scaler
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
            "average": self.average.state_dict() if self.average is not None else None,
            "loss_sum": float(self.loss_sum),
            "flops": list(self.flops or ()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        own = optimizer_parts(state["optimizer"], self.optimizer.all_params())
        require_state_of(self.optimizer.base, own)
        self._is_restored = True
        self.optimizer.load_state_dict(own)
        if self.objective.scaler is not None:
            self.objective.scaler.load_state_dict(state["scaler"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.loss_sum.fill_(state["loss_sum"])
        # Never empty: within a phase, checkpoints are taken after a step, and the first step has counted.
        per_step, per_evaluation = state["flops"]
        self.flops = (per_step, per_evaluation)
