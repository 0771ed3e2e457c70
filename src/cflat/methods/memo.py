"""MEMO: shared shallow blocks, one specialised last stage per task (Zhou et al., 2023)."""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from cflat._settings import Flag, NotNegative, settings_class
from cflat.data import Batch, Task
from cflat.methods import Extract, Loss, StreamInfo, register_method
from cflat.methods._exemplars import MemoryConfig, RehearsalWithMeans
from cflat.nn import Backbone, LinearHead, NearestMeanHead, freeze, split_backbone, unfreeze


@settings_class
class MEMOConfig(MemoryConfig):
    """Settings of MEMO."""

    auxiliary_weight: NotNegative = 1.0
    """Weight of the auxiliary classifier, which separates new classes from each other and from old ones; at least 0."""
    train_base: Flag | None = None
    """Whether the shared blocks are trained after the first task; None: yes for ResNets, no for ViTs."""
    align: Flag = True
    """Scale the new classes' weights to the norm of the old ones after each task."""
    specialised_init: Literal["backbone", "random"] = "backbone"
    """Start of the first specialized stage: from the backbone, or random as for the last block of PILOT's ViT."""


@register_method(
    "memo",
    config=MEMOConfig,
    summary="shared shallow blocks, a new specialized last stage per task",
    needs_memory=True,
    is_shardable=False,
    paper="A Model or 603 Exemplars: Towards Memory-Efficient Class-Incremental Learning (2023)",
)
class MEMO(RehearsalWithMeans):
    """Concatenate the features of all specialised stages; train the newest one."""

    network: MEMONetwork

    def __init__(self, config: MEMOConfig, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(info)
        self.config = config
        self.memory = config.make_memory(info)
        # The configurations of PyCIL train the base of ResNets, those of PILOT freeze that of ViTs.
        self.trains_base = backbone.family != "vit" if config.train_base is None else config.train_base
        self.network = MEMONetwork(backbone, config.specialised_init == "random")
        self.means = NearestMeanHead(backbone.feature_dim, metric="euclidean")
        self.num_old = 0

    def grow(self, task: Task) -> None:
        """Freeze what is done and add a specialised stage, outputs and an auxiliary classifier."""
        self.num_old = self.network.head.num_classes
        if task.index > 0:
            self.network.specialise(task.num_classes)
            if not self.trains_base:
                freeze(self.network.generalised)
        self.network.head.grow(task.num_classes)
        # Features have become wider: old means are of no use and are computed anew when the task ends.
        self.means = NearestMeanHead(self.network.head.feature_dim, metric="euclidean")

    def prepare(self, batch: Batch) -> Batch:
        """Run the shared blocks and the old stages if no trained weight changes them."""
        # In the first task everything is trained, whatever the setting.
        if self.num_old == 0 or self.trains_base:
            return batch
        shared = self.network.generalised(batch.images)
        return batch.with_(shared=shared, old=self.network.old_features(shared))

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Classify among all seen classes, and the newest features among the new classes and "old"."""
        logits, auxiliary = model(batch.images, batch.extras.get("shared"), batch.extras.get("old"))
        parts = {"classify": functional.cross_entropy(logits, batch.labels)}
        if auxiliary is not None:
            # Class 0 of the auxiliary classifier stands for all old classes.
            targets = (batch.labels - self.num_old + 1).clamp(min=0)
            parts["auxiliary"] = self.config.auxiliary_weight * functional.cross_entropy(auxiliary, targets)
        return Loss(parts)

    def finish_task(self, task: Task, extract: Extract) -> None:
        """Align the weights, herd exemplars of the new classes and compute all class means anew."""
        if self.config.align and self.num_old > 0:
            align_weights_(self.network.head, self.num_old)
        super().finish_task(task, extract)


class MEMONetwork(nn.Module):
    """Generalised blocks, specialised stages, a head over all their features and one over the newest."""

    def __init__(self, backbone: Backbone, random_stage: bool = False) -> None:
        super().__init__()
        self.generalised, stage = split_backbone(backbone)
        if random_stage:
            # The last block of a ViT or the last stage of a ResNet, which is a part's first member; a ViT's final norm
            # stands behind it and keeps its weights.
            first, *_ = stage.children()
            first.apply(_reinitialise_)
        self.stages = nn.ModuleList([stage])
        self.stage_dim = backbone.feature_dim
        self.head = LinearHead(backbone.feature_dim)
        self.auxiliary: LinearHead | None = None

    def specialise(self, num_new: int) -> None:
        """Freeze the stages and add a copy of the newest, with an auxiliary classifier for ``num_new`` classes."""
        newest = unfreeze(copy.deepcopy(freeze(self.stages)[-1]))
        self.stages.append(newest)
        self.head.grow(0, num_new_features=self.stage_dim)
        self.auxiliary = LinearHead(self.stage_dim, num_new + 1)

    def old_features(self, shared: Tensor) -> Tensor:
        """Return the features of all stages but the newest, (B, stage_dim * (stages - 1))."""
        return torch.cat([stage(shared) for stage in self.stages[:-1]], dim=1)

    def features(self, images: Tensor) -> Tensor:
        """Return the features of all stages."""
        shared = self.generalised(images)
        return torch.cat([stage(shared) for stage in self.stages], dim=1)

    def forward(
        self, images: Tensor, shared: Tensor | None = None, old: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits and auxiliary logits; ``shared`` and ``old`` may be given if they are known already."""
        if shared is None:
            shared = self.generalised(images)
        new: Tensor = self.stages[-1](shared)
        if self.auxiliary is None:
            return self.head(new), None
        old = self.old_features(shared) if old is None else old
        return self.head(torch.cat([old, new], dim=1)), self.auxiliary(new)


@torch.no_grad()
def align_weights_(head: LinearHead, num_old: int) -> None:
    """Give the new classes' weights the mean norm of the old ones' (weight alignment)."""
    # Rows over the features of all stages, without the biases, as in PyCIL.
    norms = head.weight.norm(dim=1)
    head.weight[num_old:] *= norms[:num_old].mean() / norms[num_old:].mean()


def _reinitialise_(module: nn.Module) -> None:
    # Torch's defaults, not timm's: PILOT adds its last block after timm's initialization has run.
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
