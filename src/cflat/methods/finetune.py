"""Finetune: learn each task as it comes and keep nothing; the lower bound of the field."""

from __future__ import annotations

from typing import Literal

from cflat._settings import settings_class
from cflat.data import Task
from cflat.methods import StreamInfo, register_method
from cflat.methods._classifier import ClassifierMethod
from cflat.nn import Backbone


@settings_class
class FinetuneConfig:
    """Settings of finetune."""

    # PILOT's loss is among the new ones.
    classes: Literal["seen", "new"] = "seen"
    """Classes among which the loss decides: all seen so far, or those of the present task only."""


@register_method(
    "finetune",
    config=FinetuneConfig,
    summary="train on each task in turn, without any measure against forgetting",
    scenarios=("class", "task", "domain", "blurry"),
    is_online=True,
)
class Finetune(ClassifierMethod):
    """Cross-entropy on the present task; every weight is trained."""

    config: FinetuneConfig

    def __init__(self, config: FinetuneConfig, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(config, backbone, info)
        if info.scenario == "blurry" and config.classes == "new":
            raise ValueError("method.classes='new' needs tasks with classes of their own; blurry streams take 'seen'.")

    def grow(self, task: Task) -> None:
        """Add outputs for the new classes, and classify among them alone if the settings ask for it."""
        super().grow(task)
        if self.config.classes == "new":
            self.classes = task.classes
