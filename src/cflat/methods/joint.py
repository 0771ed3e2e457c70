"""Joint: train on all tasks seen so far together; the upper bound of the field.

It keeps every image of the stream, so it is no continual learner. By default every task starts again from the same
weights: stage t is what one long training on the first t tasks would give.
"""

from __future__ import annotations

from typing import Literal

from cflat._settings import settings_class
from cflat.data import ImageSet, Task
from cflat.methods import Extract, StreamInfo, register_method
from cflat.methods._classifier import ClassifierMethod
from cflat.nn import Backbone, LinearHead, frozen_copy


@settings_class
class JointConfig:
    """Settings of joint training."""

    start: Literal["same", "warm"] = "same"
    """Weights at the start of a task: those of the first task, or those that the last one ended with."""


@register_method(
    "joint",
    config=JointConfig,
    summary="train on all tasks seen so far together; keeps all data",
    scenarios=("class", "task", "domain", "blurry"),
    is_shardable=False,
)
class Joint(ClassifierMethod):
    """Cross-entropy over all seen classes, on every image seen so far."""

    def __init__(self, config: JointConfig, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(config, backbone, info)
        # A submodule, hence part of every checkpoint: a resumed run returns to the same weights.
        self.start = frozen_copy(backbone) if config.start == "same" else None
        self.seen: list[ImageSet] = []

    def grow(self, task: Task) -> None:
        """Add outputs for the new classes, and remember the images: a restored run comes here for every task."""
        super().grow(task)
        self.seen.append(task.train)

    def start_task(self, task: Task, extract: Extract) -> None:
        """Go back to the weights of the first task, with a new head."""
        if self.start is None or task.index == 0:
            return
        self.network.backbone.load_state_dict(self.start.state_dict())
        head = self.network.head
        # Values are copied, since a new module would be on the CPU.
        head.load_state_dict(LinearHead(head.feature_dim, head.num_classes).state_dict())

    def train_images(self, task: Task) -> ImageSet:
        """Return every image seen so far."""
        return ImageSet.concat(self.seen)
