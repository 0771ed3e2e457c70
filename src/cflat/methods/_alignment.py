"""Alignment of a head by made-up features: a Gaussian for each class stands for its images (SLCA).

Usable by every method whose features change little after a class was learned.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from cflat._settings import Count, CountOrZero, NotNegative, Positive, Share, settings_class
from cflat.nn.heads import GrowingModule

# Both numbers are the authors'.
_RIDGE = 1e-4
"""Added to the diagonal of a covariance: few images span few directions."""
_TINY = 1e-7


@settings_class
class AlignmentConfig:
    """Settings of the alignment."""

    align_epochs: CountOrZero = 5
    """Epochs over made-up features after each task; 0 leaves the head as it was trained."""
    align_samples: Count = 256
    """Made-up features for each class and epoch, and features in a step; at least 1."""
    align_lr: Positive = 0.01
    """Learning rate of the alignment (SGD with momentum 0.9, cosine over its epochs); above 0."""
    align_weight_decay: NotNegative = 5e-4
    """Weight decay of the alignment; at least 0."""
    logit_norm: Positive | None = 0.1
    """Temperature of logits that are divided by their mean norm over tasks; None takes them as they are."""
    mean_decay: Share = 0.1
    """By how much the means of the oldest classes are shrunk towards 0; the newest are not."""


class ClassGaussians(GrowingModule):
    """Mean and covariance of the features of each class, as they were when it was learned.

    A covariance is kept as its Cholesky factor, feature_dim^2 numbers for each class.
    """

    growing = ("means", "factors")
    means: Tensor
    factors: Tensor

    def __init__(self, feature_dim: int) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(0, feature_dim))
        self.register_buffer("factors", torch.zeros(0, feature_dim, feature_dim))

    def grow(self, num_new: int) -> None:
        """Add classes that have no features yet."""
        dim = self.feature_dim
        self.means = torch.cat([self.means, self.means.new_zeros(num_new, dim)])
        self.factors = torch.cat([self.factors, self.factors.new_zeros(num_new, dim, dim)])

    @torch.no_grad()
    def fit(self, features: Tensor, labels: Tensor) -> None:
        """Take the mean and covariance of every class in ``labels`` from features (N, D), in double precision."""
        for label in labels.unique().tolist():
            own = features[labels == label].double()
            centered = own - own.mean(dim=0)
            covariance = centered.T @ centered / max(1, len(own) - 1)
            covariance.diagonal().add_(_RIDGE)
            self.means[label] = own.mean(dim=0).to(self.means.dtype)
            # Factored before it is rounded: a rounded covariance of few images need not be positive definite.
            self.factors[label] = torch.linalg.cholesky(covariance).to(self.factors.dtype)

    def sample(self, num: int, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``num`` features of each class and their labels; the means are multiplied by ``scales`` (C,)."""
        noise = torch.randn(self.num_classes, num, self.feature_dim, dtype=self.means.dtype, device=self.means.device)
        features = (scales[:, None] * self.means)[:, None] + noise @ self.factors.mT
        labels = torch.arange(self.num_classes, device=features.device).repeat_interleave(num)
        return features.flatten(0, 1), labels


def align_head_(head: nn.Module, gaussians: ClassGaussians, tasks: Sequence[range], config: AlignmentConfig) -> None:
    """Train a head on features drawn from the Gaussians of all classes, so that no task's outputs are favoured.

    ``tasks`` are the classes of each task, in order. Random numbers are the global ones, which the trainer has seeded.
    """
    params = list(head.parameters())
    optimizer = torch.optim.SGD(params, lr=config.align_lr, momentum=0.9, weight_decay=config.align_weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, config.align_epochs))
    # Public code divides the class by the size of the newest task, which is wrong for tasks of unequal size.
    ages = torch.cat([torch.full((len(classes),), (i + 1) / len(tasks)) for i, classes in enumerate(tasks)])
    scales = (1 - config.mean_decay + config.mean_decay * ages).to(gaussians.means)
    with torch.enable_grad():
        for _ in range(config.align_epochs):
            # Drawn anew in every epoch, as the authors do.
            features, labels = gaussians.sample(config.align_samples, scales)
            order = torch.randperm(len(labels), device=labels.device)
            for chosen in order.split(config.align_samples):
                optimizer.zero_grad()
                logits = normalized_logits(head(features[chosen]), tasks, config.logit_norm)
                functional.cross_entropy(logits, labels[chosen]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            schedule.step()
    optimizer.zero_grad()


def normalized_logits(logits: Tensor, tasks: Sequence[range], temperature: float | None) -> Tensor:
    """Return logits over their mean norm over tasks, times 1 / temperature: confidence cannot be had by large norms."""
    if temperature is None:
        return logits
    norms = torch.stack([logits[:, classes.start : classes.stop].norm(dim=1) + _TINY for classes in tasks])
    return logits / norms.mean(dim=0)[:, None] / temperature
