"""What methods share that train one classifier from end to end: its growth, its losses, a teacher."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from cflat.data import Batch, Task
from cflat.methods._base import Loss, Method, StreamInfo
from cflat.nn import Backbone, Classifier, frozen_copy


def classify(logits: Tensor, labels: Tensor, classes: range) -> Tensor:
    """Return the cross-entropy among ``classes`` alone, as if the logits of all others were -inf."""
    return functional.cross_entropy(logits[:, classes.start : classes.stop], labels - classes.start)


def distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the cross-entropy between the softened teacher and the softened logits of the classes it knows."""
    old = logits[:, : teacher.shape[1]]
    # No factor T^2, as in PILOT and PyCIL.
    return functional.cross_entropy(old / temperature, (teacher / temperature).softmax(dim=1))


class ClassifierMethod(Method):
    """Train a backbone with a linear head that grows, by cross-entropy among ``classes``: all seen so far."""

    network: Classifier

    def __init__(self, config: Any, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(info)
        self.config = config
        self.network = Classifier(backbone)
        self.classes = range(0)

    def grow(self, task: Task) -> None:
        """Add outputs for the new classes."""
        self.classes = range(task.classes.stop)
        self.network.head.grow_to(task.classes.stop)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Classify among ``classes``."""
        return Loss({"classify": classify(model(batch.images), batch.labels, self.classes)})


class DistilledMethod(ClassifierMethod):
    """Keep the network of before each task as a teacher, whose logits are known to the loss."""

    def __init__(self, config: Any, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(config, backbone, info)
        self.teacher: Classifier | None = None

    def grow(self, task: Task) -> None:
        """Keep the previous network as teacher and add outputs for the new classes."""
        if task.index > 0:
            # Before the head grows: the width of the teacher's logits tells `distillation` which classes are old.
            self.teacher = frozen_copy(self.network)
        super().grow(task)

    def prepare(self, batch: Batch) -> Batch:
        """Add the teacher's logits: they depend on no trained weight."""
        return batch if self.teacher is None else batch.with_(teacher=self.teacher(batch.images))
