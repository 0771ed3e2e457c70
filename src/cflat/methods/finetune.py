"""Finetune: learn each task as it comes and keep nothing; the lower bound of the field."""

from __future__ import annotations

from typing import Literal

from torch import nn
from torch.nn import functional

from cflat._settings import settings_class
from cflat.data import Batch, Task
from cflat.methods import Loss, Method, StreamInfo, register_method
from cflat.nn import Backbone, Classifier


@settings_class
class FinetuneConfig:
    """Settings of finetune."""

    classes: Literal["seen", "new"] = "seen"
    """Classes among which the loss decides: all seen so far, or those of the present task only."""


@register_method(
    "finetune",
    config=FinetuneConfig,
    summary="train on each task in turn, without any measure against forgetting",
    scenarios=("class", "task", "domain", "blurry"),
    is_online=True,
)
class Finetune(Method):
    """Cross-entropy on the present task; every weight is trained."""

    network: Classifier

    def __init__(self, config: FinetuneConfig, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(info)
        if info.scenario == "blurry" and config.classes == "new":
            raise ValueError("method.classes='new' needs tasks with classes of their own; blurry streams take 'seen'.")
        self.config = config
        self.network = Classifier(backbone)
        self.first_class = 0

    def grow(self, task: Task) -> None:
        """Add outputs for the new classes."""
        self.first_class = task.classes.start if self.config.classes == "new" else 0
        self.network.head.grow(task.classes.stop - self.network.head.num_classes)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Classify among the seen (or the new) classes."""
        logits = model(batch.images)[:, self.first_class :]
        return Loss({"classify": functional.cross_entropy(logits, batch.labels - self.first_class)})
