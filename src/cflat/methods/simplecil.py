"""SimpleCIL: class means of a frozen pretrained network are the classifier (Zhou et al., 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from cflat._settings import settings_class
from cflat.data import Batch, Task
from cflat.methods import Extract, Method, Phase, StreamInfo, register_method
from cflat.methods._feature_cache import FeatureCache
from cflat.nn import Backbone, NearestMeanHead, freeze


@settings_class
class SimpleCILConfig:
    """SimpleCIL has no settings."""


@register_method(
    "simplecil",
    config=SimpleCILConfig,
    summary="frozen network, nearest class mean by cosine; nothing is trained",
    scenarios=("class", "task", "domain"),
    is_pretrained=True,
    paper="Revisiting Class-Incremental Learning with Pre-Trained Models (2023)",
)
class SimpleCIL(Method):
    """Compare features with the mean feature of each class; a class met in several domains has one mean."""

    network: Backbone

    def __init__(self, config: SimpleCILConfig, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(info)
        self.config = config
        self.network = freeze(backbone)
        self.cache = FeatureCache(self.network)
        self.means = NearestMeanHead(backbone.feature_dim)

    def grow(self, task: Task) -> None:
        """Make room for the means of the new classes."""
        self.means.grow_to(task.classes.stop)

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """Return no phase: there is no loss."""
        return ()

    def finish_task(self, task: Task, extract: Extract) -> None:
        """Take the task's features into the class means."""
        features = extract(task.train, self.network)
        self.means.update(features, torch.from_numpy(task.train.labels).to(features.device))

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the cosines with all class means."""
        return {"logits": self.means(self.cache(batch, lambda: self.network(batch.images)))}
