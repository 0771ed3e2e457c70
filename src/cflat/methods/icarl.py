"""iCaRL: rehearsal, distillation and nearest-mean classification (Rebuffi et al., 2017).

As in PILOT and PyCIL the classification term is a cross-entropy over all seen classes (the original uses sigmoids),
and the distillation term carries no factor T^2.
"""

from __future__ import annotations

from torch import nn

from cflat._settings import Positive, settings_class
from cflat.data import Batch
from cflat.methods import Loss, StreamInfo, register_method
from cflat.methods._classifier import DistilledMethod, classify, distillation
from cflat.methods._exemplars import MemoryConfig, RehearsalWithMeans
from cflat.nn import Backbone, NearestMeanHead


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
class ICaRL(RehearsalWithMeans, DistilledMethod):
    """Fine-tune everything on new classes and exemplars while staying close to the previous network's logits."""

    # The nearest mean is the paper's classifier; PILOT prints cnn first, and the C-Flat papers report it.
    scores = ("nme", "cnn")
    config: ICaRLConfig

    def __init__(self, config: ICaRLConfig, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(config, backbone, info)
        self.memory = config.make_memory(info)
        self.means = NearestMeanHead(backbone.feature_dim, metric="euclidean")

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Classify among all seen classes and keep the old logits."""
        logits = model(batch.images)
        parts = {"classify": classify(logits, batch.labels, self.classes)}
        if "teacher" in batch.extras:
            parts["distil"] = distillation(logits, batch.extras["teacher"], self.config.temperature)
        return Loss(parts)
