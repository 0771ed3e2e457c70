"""Replay: train on the present task together with a few exemplars of every earlier class."""

from __future__ import annotations

from cflat.data import Task
from cflat.methods import Extract, StreamInfo, register_method
from cflat.methods._classifier import ClassifierMethod
from cflat.methods._exemplars import MemoryConfig, Rehearsal
from cflat.nn import Backbone


@register_method(
    "replay",
    config=MemoryConfig,
    summary="cross-entropy on new classes and exemplars",
    scenarios=("class", "task", "domain", "blurry"),
    needs_memory=True,
)
class Replay(Rehearsal, ClassifierMethod):
    """Cross-entropy over all seen classes, on the present task and the exemplars."""

    config: MemoryConfig

    def __init__(self, config: MemoryConfig, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(config, backbone, info)
        self.memory = config.make_memory(info)

    def finish_task(self, task: Task, extract: Extract) -> None:
        """Keep exemplars of the new classes."""
        # A random choice spares a pass over all images of the task.
        herds = self.config.selection == "herding"
        self.memory.update(task.train, extract(task.train, self.network.features) if herds else None)
