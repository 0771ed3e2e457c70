"""SLCA: fine-tune a pretrained network slowly and its head at the full rate, then align the head (Zhang et al., 2023).

A slow learner forgets little: the backbone has a hundredth of the head's learning rate. What is left is that outputs
of different tasks were never trained together; a head is therefore trained on features drawn from one Gaussian for
each class. Later tasks go on from the head as it was before the alignment.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from cflat._settings import Share, settings_class
from cflat.data import Batch, Task
from cflat.methods import Extract, Loss, Method, ParamGroup, Phase, StreamInfo, register_method
from cflat.methods._alignment import AlignmentConfig, ClassGaussians, align_head_
from cflat.nn import Backbone, LinearHead, freeze, unfreeze


@settings_class
class SLCAConfig(AlignmentConfig):
    """Settings of SLCA."""

    backbone_lr_scale: Share = 0.01
    """Learning rate of the backbone relative to the head's; 0 freezes it."""


@register_method(
    "slca",
    config=SLCAConfig,
    summary="slow fine-tuning of the backbone, then a head aligned by Gaussian features",
    is_pretrained=True,
    paper="SLCA: Slow Learner with Classifier Alignment for Continual Learning on a Pre-trained Model (2023)",
)
class SLCA(Method):
    """Classify among the classes of the present task; answer with the aligned head."""

    network: SLCANetwork

    def __init__(self, config: SLCAConfig, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(info)
        self.config = config
        self.network = SLCANetwork(backbone)
        self.gaussians = ClassGaussians(backbone.feature_dim)
        self.aligned = TaskHeads(backbone.feature_dim)
        self.tasks: list[range] = []
        if config.backbone_lr_scale == 0:
            freeze(self.network.backbone)

    def grow(self, task: Task) -> None:
        """Add outputs for the new classes; those of before are frozen."""
        self.tasks.append(task.classes)
        # Frozen first: of the head, only the part that is added now is trained.
        freeze(self.network.head).add(task.num_classes)
        self.aligned.add(task.num_classes)
        self.gaussians.grow(task.num_classes)

    def param_groups(self, task: Task, phase: Phase) -> list[ParamGroup]:
        """Train the backbone slowly and the new outputs at the full rate."""
        groups = [ParamGroup(list(self.network.head.newest.parameters()), name="head")]
        if self.config.backbone_lr_scale > 0:
            body = list(self.network.backbone.parameters())
            groups.insert(0, ParamGroup(body, lr_scale=self.config.backbone_lr_scale, name="backbone"))
        return groups

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Classify among the classes of the task."""
        classes = self.tasks[-1]
        return Loss({"classify": functional.cross_entropy(model(batch.images), batch.labels - classes.start)})

    def finish_task(self, task: Task, extract: Extract) -> None:
        """Measure the Gaussians of the new classes and align a copy of the head."""
        features = extract(task.train, self.network.backbone)
        self.gaussians.fit(features, torch.from_numpy(task.train.labels).to(features.device))
        # A copy is aligned. The authors align the head itself and return to a backup before the next task.
        self.aligned.load_state_dict(self.network.head.state_dict())
        # As the authors do: the outputs of a single task have been trained together.
        if task.index > 0:
            align_head_(unfreeze(self.aligned), self.gaussians, self.tasks, self.config)

    def skip_task(self, task: Task) -> None:
        """Have Gaussians that can be drawn from."""
        self.gaussians.factors += torch.eye(self.gaussians.feature_dim, device=self.gaussians.factors.device)

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the logits of the aligned head."""
        return {"logits": self.aligned(self.network.backbone(batch.images))}


class TaskHeads(nn.Module):
    """A linear head for each task, side by side."""

    def __init__(self, feature_dim: int) -> None:
        super().__init__()
        self.feature_dim = feature_dim
        self.parts = nn.ModuleList()

    def add(self, num_classes: int) -> None:
        """Add the head of a task."""
        self.parts.append(LinearHead(self.feature_dim, num_classes, init="truncated_normal"))

    @property
    def newest(self) -> nn.Module:
        """The head of the present task."""
        return self.parts[-1]

    def forward(self, features: Tensor) -> Tensor:
        """Return logits of all tasks, (B, classes)."""
        return torch.cat([part(features) for part in self.parts], dim=1)


class SLCANetwork(nn.Module):
    """A backbone with a head for each task, of which the newest is trained."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = TaskHeads(backbone.feature_dim)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of the present task, (B, its classes)."""
        return self.head.newest(self.backbone(images))
