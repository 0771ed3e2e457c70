"""iCaRL: rehearsal, distillation and nearest-mean classification (Rebuffi et al., 2017).

As in PILOT and PyCIL the classification term is a cross-entropy over all seen classes (the original uses sigmoids),
and the distillation term carries no factor T^2.
"""

from __future__ import annotations

from torch import nn
from torch.nn import functional

from cflat._settings import Positive, settings_class
from cflat.data import Batch, Task
from cflat.methods import Loss, StreamInfo, register_method
from cflat.methods._distillation import distillation
from cflat.methods._exemplars import MemoryConfig, RehearsalWithMeans
from cflat.nn import Backbone, Classifier, NearestMeanHead, frozen_copy


@settings_class
class ICaRLConfig(MemoryConfig):
    """Settings of iCaRL."""

    temperature: Positive = 2.0
    """Distillation temperature for old and new logits; above 0."""


@register_method(
    "icarl",
    config=ICaRLConfig,
    summary="exemplars, distillation from the previous network, nearest-mean classification",
    scenarios=("class", "task", "domain"),
    needs_memory=True,
    is_shardable=False,
    paper="iCaRL: Incremental Classifier and Representation Learning (2017)",
)
class ICaRL(RehearsalWithMeans):
    """Fine-tune everything on new classes and exemplars while staying close to the previous network's logits."""

    scores = ("nme", "cnn")
    network: Classifier

    def __init__(self, config: ICaRLConfig, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(config, info)
        self.config = config
        self.network = Classifier(backbone)
        self.teacher: Classifier | None = None
        self.means = NearestMeanHead(backbone.feature_dim, metric="euclidean")

    def grow(self, task: Task) -> None:
        """Keep the previous network as teacher and add outputs for the new classes."""
        if task.index > 0:
            self.teacher = None  # a teacher must not contain its own teacher's copy
            self.teacher = frozen_copy(self.network)
        self.network.head.grow(task.classes.stop - self.network.head.num_classes)

    def prepare(self, batch: Batch) -> Batch:
        """Add the teacher's logits: they depend on no trained weight."""
        return batch if self.teacher is None else batch.with_(teacher=self.teacher(batch.images))

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Classify among all seen classes and keep the old logits."""
        logits = model(batch.images)
        parts = {"classify": functional.cross_entropy(logits, batch.labels)}
        if "teacher" in batch.extras:
            parts["distil"] = distillation(logits, batch.extras["teacher"], self.config.temperature)
        return Loss(parts)
