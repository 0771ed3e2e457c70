"""DER++: replay with the logits that the network had when it saw the images (Buzzega et al., 2020).

Each step adds two batches from a reservoir: one whose logits must stay near those that were stored, and one that is
classified as the new images are. Stored logits are constants; those of classes that did not exist when an image was
stored are free.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from cflat._settings import NotNegative, settings_class
from cflat.data import Batch, Task
from cflat.methods import Loss, register_method
from cflat.methods._reservoir import ReservoirConfig, ReservoirReplay


@settings_class
class DERppConfig(ReservoirConfig):
    """Settings of DER++."""

    alpha: NotNegative = 0.1
    """Weight of the distance to stored logits; at least 0."""
    beta: NotNegative = 0.5
    """Weight of the cross-entropy of stored images; at least 0. 0 is DER."""


@register_method(
    "derpp",
    config=DERppConfig,
    summary="replay from a reservoir with stored logits",
    scenarios=("class", "task", "domain", "blurry"),
    is_online=True,
    needs_memory=True,
    paper="Dark Experience for General Continual Learning: a Strong, Simple Baseline (2020)",
)
class DERpp(ReservoirReplay):
    """Cross-entropy on the new images, stored logits and cross-entropy on two batches of stored ones."""

    num_replays = 2
    config: DERppConfig

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Classify new and stored images and keep the stored logits; give the new logits to the memory."""
        logits = model(batch.images)
        parts = {"classify": functional.cross_entropy(logits, batch.labels)}
        if batch.replay:
            dark, labelled = batch.replay
            kept = squared_distance(model(dark.images), dark.extras["logits"], dark.extras["logits_width"])
            parts["logits"] = self.config.alpha * kept
            parts["replay"] = self.config.beta * functional.cross_entropy(model(labelled.images), labelled.labels)
        return Loss(parts, {"logits": logits.detach()})

    def made_up_outputs(self, task: Task) -> dict[str, Tensor]:
        """Return logits of the width that the task has."""
        return {"logits": torch.zeros(len(task.train), task.classes.stop)}


def squared_distance(logits: Tensor, stored: Tensor, widths: Tensor) -> Tensor:
    """Return the mean squared distance to stored logits, for each image over the classes that existed then."""
    # Zeros fill up logits of a narrower head; without the mask they would be targets.
    is_known = torch.arange(stored.shape[1], device=stored.device) < widths[:, None]
    squares = (logits[:, : stored.shape[1]] - stored).square() * is_known
    # The mean over each image's own classes: mse_loss, as long as the head has not grown.
    return (squares.sum(dim=1) / widths).mean()
