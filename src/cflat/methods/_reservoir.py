"""What methods share that replay from a reservoir: a batch of stored images in every step, and a memory that follows.

The memory is filled step by step: these methods need no task boundaries and run on online streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cflat._settings import settings_class
from cflat.data import ImageSet, ReservoirMemory, Task
from cflat.methods import Replay, Seen, StreamInfo
from cflat.methods._classifier import ClassifierMethod
from cflat.methods._exemplars import BudgetConfig, Remembering
from cflat.nn import Backbone


@settings_class
class ReservoirConfig(BudgetConfig):
    """Settings of the reservoir."""

    sampling: Literal["reservoir", "balanced"] = "reservoir"
    """How memory_total is shared: every image seen has the same chance to be stored, or every class has the same
    number. With memory_per_class every class has a reservoir of its own."""


class ReservoirReplay(Remembering, ClassifierMethod):
    """Train on each batch together with batches from the reservoir; the batch then enters it."""

    memory: ReservoirMemory
    num_replays = 1
    """Batches from the reservoir in each step."""
    first_replay = 0
    """The task from which on stored images are replayed."""

    def __init__(self, config: ReservoirConfig, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(config, backbone, info)
        total, per_class = config.budget
        self.memory = ReservoirMemory(total=total, per_class=per_class, balanced=config.sampling == "balanced")
        # Every class gets at least one place: with more classes than places, the memory would exceed its total.
        if total is not None and config.sampling == "balanced" and total < info.num_classes:
            raise ValueError(f"method.memory_total must be at least {info.num_classes}, one per class, got {total}.")
        self.task_index = 0
        self.source: ImageSet | None = None

    def grow(self, task: Task) -> None:
        """Add outputs for the new classes."""
        super().grow(task)
        # Stored images are row numbers: any set of the split gives access to their pixels.
        self.task_index, self.source = task.index, task.train

    def replay(self, num_images: int, rng: np.random.Generator) -> Sequence[Replay]:
        """Return stored images, chosen anew in every step."""
        if len(self.memory) == 0 or self.task_index < self.first_replay:
            return ()
        assert self.source is not None
        return [Replay(*self.memory.draw(num_images, rng, self.source)) for _ in range(self.num_replays)]

    def after_step(self, seen: Seen) -> None:
        """Add the batch to the reservoir, with what the loss has returned for it."""
        # The outputs are of the first evaluation: logits at the weights before the step, as Mammoth stores them.
        self.memory.observe(seen.rows, seen.labels, **seen.outputs)

    def skip_task(self, task: Task) -> None:
        """Have stored as many images as the task would leave."""
        rows, labels = torch.from_numpy(task.train.rows), torch.from_numpy(task.train.labels)
        self.after_step(Seen(rows, labels, self.made_up_outputs(task)))

    def made_up_outputs(self, task: Task) -> dict[str, Tensor]:
        """Return values in the place of what the loss returns for the task's images; by default nothing."""
        return {}
