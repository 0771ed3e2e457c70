"""LwF: learn the new classes while the outputs for the old ones stay (Li & Hoiem, 2016).

The paper has one head per task and sums a distillation term over the old ones; PyCIL and others distil all old classes
by one softmax and give the term three times the weight.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from cflat._settings import NotNegative, Positive, settings_class
from cflat.data import Batch, Task
from cflat.methods import Loss, StreamInfo, register_method
from cflat.methods._classifier import DistilledMethod, classify, distillation
from cflat.nn import Backbone

WEIGHTS = {"toolbox": 3.0, "paper": 1.0}
"""Of the distillation term, by the way it is computed."""


@settings_class
class LwFConfig:
    """Settings of LwF."""

    temperature: Positive = 2.0
    """Distillation temperature for old and new logits; above 0."""
    weighting: Literal["toolbox", "paper"] = "toolbox"
    """Distillation by one softmax over all old classes, or by one for each old task, summed."""
    weight: NotNegative | None = None
    """Weight of the distillation term; None: 3 for toolbox, 1 for paper."""


@register_method(
    "lwf",
    config=LwFConfig,
    summary="distillation from the previous network, no exemplars",
    scenarios=("class", "task", "domain"),
    is_shardable=False,
    paper="Learning without Forgetting (2016)",
)
class LwF(DistilledMethod):
    """Cross-entropy among the classes of the task, distillation for those before it."""

    config: LwFConfig

    def __init__(self, config: LwFConfig, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(config, backbone, info)
        self.weight = WEIGHTS[config.weighting] if config.weight is None else config.weight
        self.old: list[range] = []

    def grow(self, task: Task) -> None:
        """Keep the previous network as teacher, and its classes as those that are distilled."""
        if task.index > 0 and self.classes not in self.old:  # domains share their classes, and one head
            self.old.append(self.classes)
        super().grow(task)
        self.classes = task.classes

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Classify among the classes of the task and keep the logits of the old ones."""
        # As in the toolboxes, new outputs are not warmed up on a frozen network first; the paper does so.
        logits = model(batch.images)
        parts = {"classify": classify(logits, batch.labels, self.classes)}
        if "teacher" in batch.extras:
            parts["distil"] = self.weight * self._distil(logits, batch.extras["teacher"])
        return Loss(parts)

    def _distil(self, logits: Tensor, teacher: Tensor) -> Tensor:
        heads = [range(teacher.shape[1])] if self.config.weighting == "toolbox" else self.old
        terms = [
            distillation(logits[:, old.start : old.stop], teacher[:, old.start : old.stop], self.config.temperature)
            for old in heads
        ]
        return sum(terms[1:], start=terms[0])
