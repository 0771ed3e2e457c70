"""EASE: one set of adapters per task, their features joined by prototypes (Zhou et al., 2024).

Block j of the prototypes holds class means of the features under adapter set j. A class has true means in the blocks
up to that of its own task; images for later blocks are gone, hence these are completed: an old class is in the new
block the mixture of new classes to which it is similar in its own block. Scores weight a class's own block with 1
and all others together with alpha.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from cflat._settings import Flag, NotNegative, settings_class
from cflat.data import Batch, Task
from cflat.methods import Extract, StreamInfo, register_method
from cflat.methods._adapted import AdaptedMethod, AdapterConfig
from cflat.nn import Backbone, CosineHead, forward_adapters, freeze
from cflat.nn.heads import full_precision
from cflat.nn.vit import embed


@settings_class
class EASEConfig(AdapterConfig):
    """Settings of EASE."""

    alpha: NotNegative = 0.1
    """Weight in a class's score that is shared by the adapters of the other tasks; at least 0."""
    use_init_ptm: Flag = False
    """Add a term for the plain pretrained network to the score."""
    beta: NotNegative = 1.0
    """Weight of that block; at least 0."""
    recalc_sim: Flag = True
    """Recompute all completed prototypes after each task, from all classes with true means; False: only the newest."""


@register_method(
    "ease",
    config=EASEConfig,
    summary="new adapters per task, prototypes over all of them, reweighted scores",
    families=("vit",),
    is_pretrained=True,
    paper="Expandable Subspace Ensemble for Pre-Trained Model-Based Class-Incremental Learning (2024)",
)
class EASE(AdaptedMethod):
    """Train adapters and a proxy head on each task alone; classify by prototypes in all their feature spaces."""

    prototypes: Tensor

    def __init__(self, config: EASEConfig, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(config, backbone, info)
        self.config = config
        # A fresh set adds nothing: with it, the plain network takes part in the batched pass.
        plain = [config.make_adapters(backbone)] if config.use_init_ptm else []
        # PILOT keeps old adapters in a plain list, which is neither saved nor moved nor switched to evaluation mode.
        self.frozen_sets = freeze(nn.ModuleList(plain))
        self.register_buffer("prototypes", torch.empty(len(plain), 0, backbone.feature_dim))  # (blocks, classes, D)
        self.starts: list[int] = []

    def grow(self, task: Task) -> None:
        """Freeze the adapters of the last task; add new ones, a proxy head, and room for their prototypes."""
        if self.starts:
            # The set of the first task was made with the network.
            self.frozen_sets.append(freeze(self.network.adapters))
            self.network.adapters = self.config.make_adapters(self.network.backbone)
        # A proxy for training only, thrown away with the task: prototypes classify.
        self.network.head = CosineHead(self.network.head.feature_dim, task.num_classes)
        self.first_class = task.classes.start
        self.starts.append(self.first_class)
        self.prototypes = functional.pad(self.prototypes, (0, 0, 0, task.num_classes, 0, 1))

    def finish_task(self, task: Task, extract: Extract) -> None:
        """Take the means of the new classes in all blocks, and complete the old classes in the new ones."""
        for label in task.classes:  # one class at a time: the features of a large task need not fit into memory
            features = extract(task.train.of_classes(range(label, label + 1)), self.features)
            self.prototypes[:, label] = features.float().mean(0)
        # Without the block of the plain network, in which the means of all classes are true.
        complete_(self.prototypes[-len(self.starts) :], self.starts, newest_only=not self.config.recalc_sim)

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the reweighted cosines of all seen classes."""
        weights = block_weights(self.prototypes, self.starts, self.config.alpha, self.config.beta)
        return {"logits": reweighted_cosines(self.features(batch.images), self.prototypes, weights)}

    def features(self, images: Tensor) -> Tensor:
        """Return the features under every set of adapters, (B, blocks, D), from one batched pass."""
        sets = [*self.frozen_sets, self.network.adapters]
        tokens = embed(self.network.backbone, images)
        return forward_adapters(self.network.backbone, tokens, sets).transpose(0, 1)  # type: ignore[arg-type]


@torch.no_grad()
def complete_(prototypes: Tensor, starts: Sequence[int], *, newest_only: bool = False) -> None:
    """Fill in the prototypes that old classes have in the blocks of later tasks.

    With i the task of an old class c and j > i a later block, ``prototypes[j, c]`` becomes the mean of
    ``prototypes[j, r]`` over all classes r of tasks j and later, under the softmax of the cosines between
    ``prototypes[i, c]`` and ``prototypes[i, r]``. Given are the blocks of T tasks, (T, C, D), which are true for every
    class up to that of its own task, and the first class of each; ``newest_only`` completes the last block alone.
    """
    bounds = [*starts, prototypes.shape[1]]
    units = functional.normalize(prototypes, dim=2)
    # Row c in the block of its own task; columns of earlier tasks hold completed values and are not read.
    cosines = torch.cat([units[i, start:stop] @ units[i].T for i, (start, stop) in enumerate(pairwise(bounds))])
    for j in range(max(1, len(starts) - 1) if newest_only else 1, len(starts)):
        similarity = cosines[: starts[j], starts[j] :].softmax(dim=1)
        prototypes[j, : starts[j]] = similarity @ prototypes[j, starts[j] :]


def block_weights(prototypes: Tensor, starts: Sequence[int], alpha: float, beta: float) -> Tensor:
    """Return the weight of each block in the score of each class, (blocks, C).

    1 for the block of the class's own task, alpha / (T - 1) for those of the T - 1 others, beta for a block before
    those of the tasks, which is the plain network's.
    """
    num_tasks, (num_blocks, num_classes, _) = len(starts), prototypes.shape
    weights = prototypes.new_full((num_blocks, num_classes), beta)
    weights[-num_tasks:] = alpha / max(1, num_tasks - 1)
    for block, (start, stop) in enumerate(pairwise([*starts, num_classes]), start=num_blocks - num_tasks):
        weights[block, start:stop] = 1.0
    return weights


def reweighted_cosines(features: Tensor, prototypes: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums over blocks of the cosines between features (B, blocks, D) and prototypes, (B, C)."""
    # Without PILOT's factor sigma, which all scores share.
    with full_precision(features):
        rows = weights.unsqueeze(2) * functional.normalize(prototypes, dim=2)
        features = functional.normalize(features.to(rows.dtype), dim=2)
        return features.flatten(1) @ rows.transpose(0, 1).flatten(1).T
