"""APER with adapters: adapt once, then classify by the means of plain and adapted features (Zhou et al., 2023).

The first task trains adapters; from then on nothing is trained, and a class is the mean of the concatenated features
of the plain and the adapted network.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cflat.data import Batch, Task
from cflat.methods import Extract, StreamInfo, register_method
from cflat.methods._adapted import AdapterConfig, FirstTaskAdapted
from cflat.nn import Backbone, NearestMeanHead, forward_adapters, freeze
from cflat.nn.vit import embed


@register_method(
    "aper",
    config=AdapterConfig,
    summary="adapters trained in the first task, nearest mean of plain and adapted features",
    scenarios=("class", "task", "domain"),
    families=("vit",),
    is_pretrained=True,
    paper="Revisiting Class-Incremental Learning with Pre-Trained Models (2023)",
)
class APER(FirstTaskAdapted):
    """Join what pretraining knows with what the first task taught."""

    def __init__(self, config: AdapterConfig, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(config, backbone, info)
        self.plain = freeze(config.make_adapters(backbone))  # adds nothing: the plain network in a batched pass
        self.means = NearestMeanHead(2 * backbone.feature_dim)

    def grow(self, task: Task) -> None:
        """Make room for the means of the new classes; the head belongs to the first task."""
        super().grow(task)
        self.means.grow_to(task.classes.stop)

    def finish_task(self, task: Task, extract: Extract) -> None:
        """Take the task's features into the class means."""
        features = extract(task.train, self.features)
        self.means.update(features, torch.from_numpy(task.train.labels).to(features.device))

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the cosines with all class means."""
        return {"logits": self.means(self.cache(batch, lambda: self.features(batch.images)))}

    def features(self, images: Tensor) -> Tensor:
        """Return plain and adapted features side by side, (B, 2 D)."""
        backbone = self.network.backbone
        both = forward_adapters(backbone, embed(backbone, images), [self.plain, self.network.adapters])
        # Neither half is normalized before they are joined, as in the authors' code.
        return both.transpose(0, 1).flatten(1)
