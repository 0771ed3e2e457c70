"""`FlatnessObserver`: how flat the training loss is where the last trained task ends."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from torch import nn

from cflat.analysis.flatness import Flatness, measure_flatness
from cflat.data import Batch
from cflat.optim import SharpnessAware
from cflat.train import Observer
from cflat.train.objective import Objective
from cflat.train.observer import StepEvent


class FlatnessObserver(Observer):
    """Measure at the end of the first and of the last task, on their last batch; training is not changed by a bit.

    The first, since some methods train in the first task alone; the later measurement replaces the earlier one.
    """

    def __init__(self) -> None:
        self.found: Flatness | None = None
        self._at: tuple[Objective, Batch] | None = None

    def on_phase_start(self, optimizer: SharpnessAware, network: nn.Module) -> None:
        """Remember what is trained."""
        self._optimizer, self._network = optimizer, network

    def on_step_start(self, epoch: int, objective: Objective, batch: Batch) -> None:
        """Remember the batch, or its first micro-batch: no more fits into memory at once."""
        self._at = (objective, objective.micro_batches(batch)[0])

    def on_step(self, event: StepEvent) -> None:
        """Measure after the last step of a phase."""
        # Of every phase: which one is the last is not known before the task ends.
        is_end = event.epoch + 1 == event.num_epochs and event.step + 1 == event.num_steps
        if not is_end or event.task not in (0, event.num_tasks - 1) or self._at is None:
            return
        objective, batch = self._at
        trained = [param for param in self._optimizer.all_params() if param.requires_grad]
        modes = {module: module.training for module in self._network.modules()}
        self._network.eval()  # a fixed function: no dropout, and BatchNorm's statistics as they are
        try:
            self.found = measure_flatness(lambda: objective.loss(batch), trained, model=self._network)
        finally:
            for module, mode in modes.items():
                module.training = mode

    def values(self) -> dict[str, float]:
        """Return the finite ones of both numbers by name; empty if nothing was trained."""
        found = {} if self.found is None else asdict(self.found)
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def state(self) -> dict[str, Any]:
        """Return what was measured so far."""
        return self.values()

    def load(self, state: dict[str, Any]) -> None:
        """Restore what was measured before."""
        self.found = Flatness(**{"sharpness": math.nan, "eigenvalue": math.nan, **state}) if state else None
