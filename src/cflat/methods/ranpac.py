"""RanPAC: adapt once, then ridge regression on random features of all tasks (McDonnell et al., 2023).

The first task trains adapters under a cosine head. After that, and in every later task, features are projected to
``relu(features @ projection)``, and the classifier is the ridge regression to one-hot labels of everything seen:
`cflat.nn.ridge`. PILOT scores by the cosine with its rows instead, ``scoring="cosine"`` here.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from cflat._settings import Count, Flag, settings_class
from cflat.data import Batch, Task
from cflat.methods import Extract, Phase, StreamInfo, register_method
from cflat.methods._adapted import AdapterConfig, FirstTaskAdapted
from cflat.nn import Backbone, RidgeHead


@settings_class
class RanPACConfig(AdapterConfig):
    """Settings of RanPAC."""

    num_projections: Count | None = None
    """Random features M; at least 1. None: 10,000, or 16 for each feature of a small network."""
    scoring: Literal["linear", "cosine"] = "linear"
    """Regression scores as in the authors' code, or cosines with the rows of the solution as in PILOT."""
    adapt: Flag = True
    """Train adapters in the first task; if False, use the pretrained features unchanged."""
    double: Flag = False
    """Sum and solve in double precision: twice the memory, for features that single precision cannot separate."""

    def make_head(self, feature_dim: int) -> RidgeHead:
        """Return an empty ridge head; torch's generator decides its projection."""
        # 10,000 is the authors' number, for the 768 features of a ViT-B.
        num_projections = self.num_projections or min(10_000, 16 * feature_dim)
        # Drawn from a seed, the projection advances the global generator alike for every size.
        seed = int(torch.randint(2**31, ()))
        dtype = torch.float64 if self.double else torch.float32
        return RidgeHead(feature_dim, num_projections, seed=seed, scoring=self.scoring, dtype=dtype)


@register_method(
    "ranpac",
    config=RanPACConfig,
    summary="adapters trained in the first task, ridge regression on random features of all tasks",
    scenarios=("class", "task", "domain"),
    families=("vit",),
    is_pretrained=True,
    paper="RanPAC: Random Projections and Pre-trained Models for Continual Learning (2023)",
)
class RanPAC(FirstTaskAdapted):
    """Solve all tasks at once from sums: order and number of tasks leave no trace but through the adapters."""

    def __init__(self, config: RanPACConfig, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(config, backbone, info)
        self.config = config
        self.ridge = config.make_head(backbone.feature_dim)

    def grow(self, task: Task) -> None:
        """Make room for the new classes; the head belongs to the first task."""
        super().grow(task)
        # Grows with the tasks; PILOT must know the number of all classes beforehand.
        self.ridge.grow_to(task.classes.stop)

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """Return one phase for the first task, none for later ones or without adaptation."""
        return super().phases(task) if self.config.adapt else ()

    def finish_task(self, task: Task, extract: Extract) -> None:
        """Choose the ridge on the task's features, add them to the sums, and solve for all classes."""
        features = extract(task.train, self.network.features)
        # The task alone decides which images choose the ridge; in PILOT the shuffle of a loader does.
        self.ridge.fit(features, torch.from_numpy(task.train.labels).to(features.device), seed=task.index)

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the regression scores of all seen classes."""
        features = self.cache(batch, lambda: self.network.features(batch.images))
        return {"logits": self.ridge(features)}
