"""ER-ACE: replay in which new images cannot push old classes away (Caccia et al., 2022).

The cross-entropy of the new images is among the classes in their batch alone; that of stored images is among all
classes seen so far. A fresh class then does not start by suppressing all others, which is what forgetting begins with.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from cflat.data import Batch
from cflat.methods import Loss, register_method
from cflat.methods._reservoir import ReservoirConfig, ReservoirReplay
from cflat.nn.ranks import sum_over_batch


@register_method(
    "er_ace",
    config=ReservoirConfig,
    summary="replay from a reservoir; new images compete among the classes of their batch only",
    scenarios=("class", "task", "blurry"),
    is_online=True,
    needs_memory=True,
    paper="New Insights on Reducing Abrupt Representation Change in Online Continual Learning (2022)",
)
class ERACE(ReservoirReplay):
    """Asymmetric cross-entropy: masked for new images, over all seen classes for stored ones."""

    first_replay = 1

    def prepare(self, batch: Batch) -> Batch:
        """Add the classes of the whole batch, which may be on several ranks, as a row for each image."""
        counts = torch.bincount(batch.labels, minlength=self.network.head.num_classes)
        # A row for each image: batches with other tensors cannot be split into micro-batches.
        return batch.with_(is_present=(sum_over_batch(counts) > 0).expand(len(batch), -1))

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Classify new images among the classes of their batch, stored ones among all."""
        logits = model(batch.images)
        if self.task_index >= self.first_replay:  # as public code does: the first task has nothing to protect
            # No loss is infinite: the class of an image is always in its batch.
            logits = logits.masked_fill(~batch.extras["is_present"], -torch.inf)
        parts = {"classify": functional.cross_entropy(logits, batch.labels)}
        if batch.replay:
            (stored,) = batch.replay
            parts["replay"] = functional.cross_entropy(model(stored.images), stored.labels)
        return Loss(parts)
