"""DUCT: one merged backbone and a transported cosine head for streams of domains or classes (Zhou et al., 2025).

Task b trains a fresh copy of the pretrained backbone theta_0, with a new block of head rows, to theta_b. Then:

    merged  <-  merged + merge_ratio * s_b * (theta_b - theta_0),    merged_0 = theta_0
    W_b     <-  trained anew on the features of the merged backbone
    W_a     <-  (1 - transport_ratio) * W_a + transport_ratio * n_a * T_a' W_b    for every old block a

s_b is the mean over the new classes of the cosine between their mean features under theta_0 and theta_b, and T_a the
entropic transport plan between the mean features, under theta_0, of the new and the old block's n_a classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from cflat._settings import CountOrZero, Flag, NotNegative, Positive, Share, settings_class
from cflat.data import Batch, ImageSet, Task
from cflat.methods._base import Extract, Loss, Method, ParamGroup, Phase, StreamInfo
from cflat.methods._catalog import register_method
from cflat.nn.backbone import Backbone
from cflat.nn.heads import CosineHead, NearestMeanHead
from cflat.nn.surgery import frozen_copy, merge_weights, named_weights
from cflat.nn.transport import Sinkhorn, transport_rows


@settings_class
class DUCTConfig:
    """Settings of DUCT."""

    merge_ratio: NotNegative = 0.25
    """Share of each task's weight change in the merged backbone; at least 0. Shares add up over the tasks."""
    transport_ratio: Share = 0.25
    """Share of transported new rows in the old ones; from 0 to 1."""
    regularization: Positive = 0.02
    """Entropy weight of the transport, in units of feature distance; above 0."""
    backbone_lr_scale: NotNegative = 0.01
    """Learning rate of the backbone relative to the head's; at least 0."""
    retrain_epochs: CountOrZero = 5
    """Epochs in which the head alone is trained on the merged backbone; at least 0."""
    similarity_scales: Flag = True
    """Scale each weight change by s_b as the paper and PILOT do; False is s_b = 1, as in the authors' later code."""
    normalize_plan: Flag = True
    """Mix in averages of new rows; False leaves out the factor n_a, as public code does."""
    sinkhorn: Sinkhorn = "log"
    """plain is the public solver, whose plan underflows to 0 if distances exceed 745 times the regularization."""
    zero_rows: Flag = False
    """Initialize later blocks with zeros as in PILOT; their first gradient is about 1e12 times too large."""
    reset_sigma: Flag = False
    """Set the head's scale to 1 at every task, as the authors' code does."""


@register_method(
    "duct",
    config=DUCTConfig,
    summary="merge separately trained backbones, transport old classifier rows towards the new ones",
    scenarios=("class", "task", "domain"),
    families=("vit",),
    is_pretrained=True,
    is_shardable=False,
    paper="Dual Consolidation for Pre-Trained Model-Based Domain-Incremental Learning (2025)",
)
class DUCT(Method):
    """Train backbone and head, merge, then train the head alone on features that are computed once per step.

    Each task has a block of head rows of its own. Where domains share their labels, the score of a class is its best
    over the blocks, which decides like growing labels that are compared modulo the number of classes.
    """

    network: DUCTNetwork

    def __init__(self, config: DUCTConfig, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(info)
        self.config = config
        self.network = DUCTNetwork(backbone)
        self.pretrained = frozen_copy(backbone)
        # Apart from the trained backbone, which returns to theta_0 at every task.
        self.merged = frozen_copy(backbone)
        self.means = NearestMeanHead(backbone.feature_dim)
        self.blocks: list[range] = []
        self.first_class = 0

    def grow(self, task: Task) -> None:
        """Add a block of head rows."""
        start = self.blocks[-1].stop if self.blocks else 0
        # PILOT's first block is random, too: only rows that are added to a head are zero.
        self.network.add_block(task.num_classes, zero_rows=self.config.zero_rows and start > 0)
        if self.config.reset_sigma:
            nn.init.ones_(self.network.head.sigma)
        self.blocks.append(range(start, start + task.num_classes))
        self.first_class = task.classes.start
        # Not grow_to: domains that share their labels have a block each.
        self.means.grow(task.num_classes)

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """Return training of everything, then of the head on the merged backbone."""
        # Also for 0 epochs: weights are merged where the second phase starts.
        return Phase("train"), Phase("retrain", epochs=self.config.retrain_epochs)

    def enter_phase(self, task: Task, phase: Phase) -> None:
        """Freeze the backbone in all but the first phase."""
        # A frozen backbone also lets `prepare` compute the features once per step.
        self.network.backbone.requires_grad_(phase.name == "train")

    def param_groups(self, task: Task, phase: Phase) -> list[ParamGroup]:
        """Return the newest head rows and, in the first phase, the backbone."""
        head, backbone = self.network.head, self.network.backbone
        # At the run's rate in both phases: the separate one of public code never reaches its head.
        groups = [ParamGroup(list(head.parameters()), name="head")]
        if phase.name == "train":
            groups.append(ParamGroup(list(backbone.parameters()), self.config.backbone_lr_scale, "backbone"))
        return groups

    def start_task(self, task: Task, extract: Extract) -> None:
        """Return to the pretrained weights and take the class means under them."""
        self.network.backbone.load_state_dict(named_weights(self.pretrained), strict=False)  # buffers stay
        features = extract(task.train, self.pretrained)
        self.means.update(features, self._local_labels(task.train, features) + self.blocks[-1].start)

    def start_phase(self, task: Task, phase: Phase, extract: Extract) -> None:
        """Merge what the first phase learned before the second one."""
        if phase.name != "retrain":
            return
        backbone = self.network.backbone
        scale = self._similarity(task, extract) if self.config.similarity_scales else 1.0
        trained, start = named_weights(backbone), named_weights(self.pretrained)
        delta = {name: trained[name] - start[name] for name in start}
        merged = merge_weights(named_weights(self.merged), [delta], [scale], alpha=self.config.merge_ratio)
        self.merged.load_state_dict(merged, strict=False)
        backbone.load_state_dict(merged, strict=False)

    def prepare(self, batch: Batch) -> Batch:
        """Add the features when the backbone is frozen: the head alone is trained on them."""
        return batch.with_(features=self.network.backbone(batch.images)) if self.network.is_frozen else batch

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Classify among the classes of the task."""
        logits = model(batch.images, batch.extras.get("features"))
        return Loss({"classify": functional.cross_entropy(logits, batch.labels - self.first_class)})

    @torch.no_grad()
    def finish_task(self, task: Task, extract: Extract) -> None:
        """Transport the new rows to every old block."""
        # From the rows as they were before: blocks must not depend on the order in which they are done.
        rows, means, new = self.network.rows, self.means.means, self._present(self.blocks[-1])
        for block in self.blocks[:-1]:
            old = self._present(block)
            self.network.old_rows[old] = transport_rows(
                rows[old],
                rows[new],
                means[old],
                means[new],
                regularization=self.config.regularization,
                ratio=self.config.transport_ratio,
                normalize_plan=self.config.normalize_plan,
                sinkhorn=self.config.sinkhorn,
            )

    @torch.no_grad()
    def skip_task(self, task: Task) -> None:
        """Give the new classes means, which the transport of later tasks reads."""
        block = self.blocks[-1]
        self.means.sums[block.start : block.stop].normal_()
        self.means.counts[block.start : block.stop] = 1

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return scaled cosines with all rows, or each class's best over the domains if they share labels."""
        # A domain may lack a class, whose row was then never trained.
        scores = self.network.scores(batch.images).masked_fill(self.means.counts == 0, -torch.inf)
        if self.info.scenario == "domain" and self.info.label_modulus is None:
            scores = scores.unflatten(1, (len(self.blocks), -1)).amax(dim=1)
        return {"logits": scores}

    def _similarity(self, task: Task, extract: Extract) -> float:
        """Return s_b: how little training has turned the class means."""
        # Under the test transform, as the means before; PILOT augments here.
        features = extract(task.train, self.network.backbone)
        after = NearestMeanHead(self.means.feature_dim, task.num_classes).to(features.device)
        after.update(features, self._local_labels(task.train, features))
        before = self.means.means[self.blocks[-1].start :]
        return float(functional.cosine_similarity(before, after.means)[after.counts > 0].mean())

    def _present(self, block: range) -> Tensor:
        """Return the rows of a block whose classes have training images; a shared label may lack them in a domain."""
        return block.start + self.means.counts[block.start : block.stop].nonzero().flatten()

    def _local_labels(self, images: ImageSet, features: Tensor) -> Tensor:
        return torch.from_numpy(images.labels - self.first_class).to(features.device)


class DUCTNetwork(nn.Module):
    """A backbone with a cosine head: the newest block of rows is trained, older ones are constants."""

    old_rows: Tensor

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = CosineHead(backbone.feature_dim)
        self.register_buffer("old_rows", torch.empty(0, backbone.feature_dim))

    @property
    def is_frozen(self) -> bool:
        """Whether the head alone is trained."""
        return not any(parameter.requires_grad for parameter in self.backbone.parameters())

    def add_block(self, num_new: int, *, zero_rows: bool) -> None:
        """Add the newest rows to the old ones and begin a new block; the scale is kept."""
        # Apart from the new rows, old ones escape weight decay and the norms of perturbations.
        self.old_rows = self.rows
        head = CosineHead(self.head.feature_dim)
        head.grow(num_new, zero_rows=zero_rows)
        head.sigma = self.head.sigma
        self.head = head

    @property
    def rows(self) -> Tensor:
        """All head rows, old blocks first, without gradients."""
        return torch.cat([self.old_rows, self.head.weight.detach()])

    def forward(self, images: Tensor, features: Tensor | None = None) -> Tensor:
        """Return scores among the newest classes; ``features`` may be given if they are known already."""
        return self.head(self.backbone(images) if features is None else features)

    def scores(self, images: Tensor) -> Tensor:
        """Return scores among all rows, old blocks first."""
        return functional_call(self.head, {"weight": self.rows}, (self.backbone(images),))
