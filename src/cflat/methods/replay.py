"""Replay: train on the present task together with a few exemplars of every earlier class."""

from __future__ import annotations

from torch import nn
from torch.nn import functional

from cflat.data import Batch, Task
from cflat.methods import Extract, Loss, StreamInfo, register_method
from cflat.methods._exemplars import MemoryConfig, Rehearsal
from cflat.nn import Backbone, Classifier


@register_method(
    "replay",
    config=MemoryConfig,
    summary="cross-entropy on new classes and exemplars",
    scenarios=("class", "task", "domain", "blurry"),
    needs_memory=True,
)
class Replay(Rehearsal):
    """Cross-entropy over all seen classes, on the present task and the exemplars."""

    network: Classifier

    def __init__(self, config: MemoryConfig, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(config, info)
        self.config = config
        self.network = Classifier(backbone)

    def grow(self, task: Task) -> None:
        """Add outputs for the new classes."""
        self.network.head.grow(task.classes.stop - self.network.head.num_classes)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Classify among all seen classes."""
        return Loss({"classify": functional.cross_entropy(model(batch.images), batch.labels)})

    def finish_task(self, task: Task, extract: Extract) -> None:
        """Keep exemplars of the new classes."""
        herds = self.config.selection == "herding"
        self.memory.update(task.train, extract(task.train, self.network.features) if herds else None)
