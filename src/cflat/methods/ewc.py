"""EWC: weights that mattered for earlier tasks are held where they were (Kirkpatrick et al., 2017).

After each task the diagonal of the Fisher information F is measured at the weights theta* that it ended with; later
tasks pay ``weight / 2 * F * (theta - theta*)^2``. The penalty is part of the loss, hence every evaluation of a
flatness-aware step sees it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from cflat._settings import Count, NotNegative, Positive, Share, settings_class
from cflat.data import Batch, Task
from cflat.methods import Extract, Loss, StreamInfo, register_method
from cflat.methods._classifier import ClassifierMethod, classify
from cflat.nn import Backbone, WeightAnchor


@settings_class
class EWCConfig:
    """Settings of EWC."""

    weight: NotNegative = 1000.0
    """Weight of the penalty, lambda in the paper; at least 0."""
    fisher: Literal["empirical", "true", "weighted"] = "empirical"
    """Labels of the Fisher information: those of the images, or the expectation over what the network predicts, which
    takes a backward pass for each class; weighted: of that expectation the term of the image's label (Mammoth)."""
    fisher_batch: Count = 1
    """Images whose mean gradient is squared: 1 is the Fisher information, more is the faster estimate of toolboxes."""
    fisher_max: Positive | None = None
    """Upper bound of the Fisher information of a task: keeps steps stable under a large weight."""
    consolidation: Literal["sum", "online"] = "sum"
    """One penalty for each task, or one around the latest weights with decaying importance (online EWC)."""
    decay: Share = 1.0
    """Fraction of the importance that is kept when a task ends; online only."""
    classes: Literal["new", "seen"] = "new"
    """Classes among which the loss decides: those of the present task only, or all seen so far."""

    def __post_init__(self) -> None:
        if self.fisher != "empirical" and self.fisher_batch > 1:
            raise ValueError(f"fisher={self.fisher!r} predicts for each image by itself; it needs fisher_batch=1.")


@register_method(
    "ewc",
    config=EWCConfig,
    summary="a quadratic penalty on weights that mattered for earlier tasks (Fisher information)",
    scenarios=("class", "task", "domain"),
    is_shardable=False,
    paper="Overcoming catastrophic forgetting in neural networks (2017)",
)
class EWC(ClassifierMethod):
    """Cross-entropy on the present task, and the penalty."""

    config: EWCConfig

    def __init__(self, config: EWCConfig, backbone: Backbone, info: StreamInfo) -> None:
        super().__init__(config, backbone, info)
        self.anchor = WeightAnchor()
        self.is_anchored = False

    def grow(self, task: Task) -> None:
        """Add outputs for the new classes; they are not held."""
        super().grow(task)
        if self.config.classes == "new":
            self.classes = task.classes
        self.anchor.resize_(self.network)
        self.is_anchored = task.index > 0

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Classify, and hold the weights."""
        parts = dict(super().loss(model, batch).parts)
        if self.is_anchored:
            # Not `model`: a wrapper for several devices gives parameters other names than the anchor's.
            parts["penalty"] = self.config.weight / 2 * self.anchor(self.network)
        return Loss(parts)

    def finish_task(self, task: Task, extract: Extract) -> None:
        """Measure the Fisher information of the task and hold the weights that matter."""
        size = self.config.fisher_batch
        total = extract.sum(task.train, self._squared_gradients, labels=True, gradients=True, batch_size=size)
        fisher = (total / len(task.train)).clamp(max=self.config.fisher_max or torch.inf)
        params = dict(self.network.named_parameters())
        # In the order of `parameters`, in which `_squared_gradients` joined them.
        parts = fisher.split([param.numel() for param in params.values()])
        importance = {name: part.view_as(params[name]) for name, part in zip(params, parts, strict=True)}
        if self.config.consolidation == "online":
            self.anchor.replace_(self.network, importance, decay=self.config.decay)
        else:
            self.anchor.add_(self.network, importance)

    def _squared_gradients(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the squared gradient of the mean log-likelihood, once for each image, as one vector."""
        logits, params = self.network(images), list(self.network.parameters())
        chances = [(1.0, labels)]
        if self.config.fisher != "empirical":  # of a single image
            (own,) = logits[:, self.classes.start : self.classes.stop].detach().softmax(dim=1).tolist()
            wanted = self.classes if self.config.fisher == "true" else labels.tolist()
            chances = [(own[c - self.classes.start], torch.full_like(labels, c)) for c in wanted]
        # One flat vector: ranks sum it in a single collective.
        total = torch.zeros_like(torch.cat([param.flatten() for param in params]))
        for chance, targets in chances:
            loss = classify(logits, targets, self.classes)
            gradients = torch.autograd.grad(loss, params, retain_graph=len(chances) > 1)
            total += chance * torch.cat([gradient.flatten() for gradient in gradients]).square()
        return len(images) * total
