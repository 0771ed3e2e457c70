"""Classifier heads that grow with the classes: linear, cosine and nearest mean.

All share one small interface, as does the ridge head of `cflat.nn.ridge`: ``head(features)`` gives scores of shape
(B, num_classes), larger is better, ``head.num_classes`` counts the classes and ``head.grow(num_new)`` adds some.
Everything that a head knows is in its ``state_dict``, and a head of any size loads the state of any other size.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from cflat._ranges import CountOrZero, checked
from cflat.nn.backbone import Backbone


def full_precision(tensor: Tensor) -> torch.autocast:
    """Switch autocast off on the tensor's device: cosines of near classes are equal in half precision."""
    return torch.autocast(tensor.device.type, enabled=False)


class GrowingModule(nn.Module):
    """Give the tensors named in ``growing``, which grow with the classes, the shape of a loaded state dict.

    Growing and loading another size replace the `nn.Parameter` objects: build the optimizer afterwards.
    """

    growing: ClassVar[tuple[str, ...]]
    """Tensors with a row for each class; the first has a column for each feature."""

    @property
    def num_classes(self) -> int:
        """Number of classes that have a score."""
        return getattr(self, self.growing[0]).shape[0]

    @property
    def feature_dim(self) -> int:
        """Width of the features."""
        return getattr(self, self.growing[0]).shape[1]

    @abstractmethod
    def grow(self, num_new: int) -> None:
        """Add classes."""

    def grow_to(self, num_classes: int) -> None:
        """Add the classes that are missing; domains that share their labels bring none."""
        self.grow(max(0, num_classes - self.num_classes))

    # Torch's hook for modules that prepare themselves for a state dict.
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in self.growing:
            saved = state_dict.get(prefix + name)
            current: Tensor = getattr(self, name)
            if saved is not None and saved.shape != current.shape:
                self._replace(name, torch.empty(saved.shape, dtype=current.dtype, device=current.device))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _replace(self, name: str, values: Tensor) -> None:
        """Put ``values`` in the place of a parameter or a buffer."""
        current = getattr(self, name)
        if isinstance(current, nn.Parameter):
            values = nn.Parameter(values, requires_grad=current.requires_grad)
        setattr(self, name, values)


class LinearHead(GrowingModule):
    """Score classes with ``features @ weight.T + bias``.

    New weights are Kaiming-uniform with linear gain, or normal with deviation 0.02, truncated (L2P, DualPrompt); biases
    start at 0.

    >>> head = LinearHead(8, 2)
    >>> head.grow(3)
    >>> head(torch.zeros(1, 8)).shape
    torch.Size([1, 5])
    """

    growing = ("weight", "bias")

    def __init__(
        self, feature_dim: int, num_classes: int = 0, *, init: Literal["kaiming", "truncated_normal"] = "kaiming"
    ) -> None:
        super().__init__()
        self.init = init
        self.weight = nn.Parameter(torch.empty(0, feature_dim))
        self.bias = nn.Parameter(torch.empty(0))
        self.grow(num_classes)

    @checked
    def grow(self, num_new: CountOrZero, *, num_new_features: CountOrZero = 0) -> None:
        """Add classes, and inputs behind the others (MEMO); known weights keep their place, the rest is random."""
        num_old, old_dim = self.weight.shape
        if num_new == num_new_features == 0:
            return
        weight = self.weight.new_empty(num_old + num_new, old_dim + num_new_features)
        # Torch warns about the initialization of tensors without elements.
        if weight.numel():
            if self.init == "kaiming":
                nn.init.kaiming_uniform_(weight, nonlinearity="linear")
            else:
                nn.init.trunc_normal_(weight, std=0.02)
        # The toolboxes, too, draw a whole larger layer and copy the old weights into it.
        weight[:num_old, :old_dim] = self.weight.detach()
        self._replace("weight", weight.detach())
        self._replace("bias", torch.cat([self.bias.detach(), self.bias.new_zeros(num_new)]))

    def forward(self, features: Tensor) -> Tensor:
        """Return logits."""
        return functional.linear(features, self.weight, self.bias)


class CosineHead(GrowingModule):
    """Score classes with ``sigma * cos(features, weight)``; sigma is learnable and starts at 1."""

    growing = ("weight",)

    def __init__(self, feature_dim: int, num_classes: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, feature_dim))
        self.sigma = nn.Parameter(torch.ones(()))
        self.grow(num_classes)

    @checked
    def grow(self, num_new: CountOrZero, *, zero_rows: bool = False) -> None:
        """Add classes with random rows, uniform in +-1/sqrt(feature_dim); old rows and sigma stay.

        ``zero_rows`` adds zeros instead, as PILOT does. Only for rows that are overwritten (by prototypes) before any
        training: the gradient of a normalized zero row is some 1e12 times too large. One step throws the row so far
        away that it never turns again, and every global gradient norm (SAM, C-Flat, clipping) is that of this row.
        """
        rows = self.weight.new_zeros(num_new, self.feature_dim)
        if not zero_rows:
            bound = self.feature_dim**-0.5
            rows = rows.uniform_(-bound, bound)
        self._replace("weight", torch.cat([self.weight.detach(), rows]))

    def forward(self, features: Tensor) -> Tensor:
        """Return scaled cosines."""
        with full_precision(features):
            rows = functional.normalize(self.weight, dim=1)
            features = functional.normalize(features.to(rows.dtype), dim=1)
            return self.sigma * functional.linear(features, rows)


class NearestMeanHead(GrowingModule):
    """Score classes by how near their mean feature is; nothing is trained.

    A class without features scores ``-inf``. Features may arrive in any number of batches and tasks: domain streams
    keep updating the same classes. The metric ``"cosine"`` compares with the mean of the raw
    features (SimpleCIL); ``"euclidean"`` is minus the squared distance between the unit feature and the unit mean of
    unit features (iCaRL's NME).
    """

    growing = ("sums", "counts")
    sums: Tensor
    counts: Tensor

    def __init__(
        self, feature_dim: int, num_classes: int = 0, *, metric: Literal["cosine", "euclidean"] = "cosine"
    ) -> None:
        super().__init__()
        self.metric = metric
        self.register_buffer("sums", torch.zeros(num_classes, feature_dim))
        self.register_buffer("counts", torch.zeros(num_classes))

    @property
    def means(self) -> Tensor:
        """Mean features, (num_classes, feature_dim): raw ones, or unit ones for the Euclidean metric."""
        # Classes without features would give 0 / 0; `forward` masks them.
        means = self.sums / self.counts.clamp(min=1).unsqueeze(1)
        return means if self.metric == "cosine" else functional.normalize(means, dim=1)

    @checked
    def grow(self, num_new: CountOrZero) -> None:
        """Add classes that have no features yet."""
        self.sums = torch.cat([self.sums, self.sums.new_zeros(num_new, self.feature_dim)])
        self.counts = torch.cat([self.counts, self.counts.new_zeros(num_new)])

    def reset(self) -> None:
        """Forget all features and keep the number of classes: iCaRL's means follow the current network."""
        self.sums.zero_()
        self.counts.zero_()

    @torch.no_grad()
    def update(self, features: Tensor, labels: Tensor) -> None:
        """Count in features (B, feature_dim) with labels (B,); labels of unknown classes grow the head."""
        if not len(labels):
            return
        self.grow_to(int(labels.max()) + 1)
        features = features.to(self.sums.dtype)
        if self.metric == "euclidean":
            features = functional.normalize(features, dim=1)
        # A product instead of index_add_, whose order of additions is undefined on GPUs.
        membership = functional.one_hot(labels, self.num_classes).to(self.sums.dtype)  # (B, C)
        self.sums += membership.T @ features
        self.counts += membership.sum(0)

    def forward(self, features: Tensor) -> Tensor:
        """Return cosines or minus squared distances."""
        means = self.means
        with full_precision(features):
            features = functional.normalize(features.to(means.dtype), dim=1)
            if self.metric == "cosine":
                scores = functional.linear(features, functional.normalize(means, dim=1))
            else:
                scores = -torch.cdist(features, means).square()
        return scores.masked_fill(self.counts == 0, -torch.inf)


class Classifier(nn.Module):
    """Score images with a growing linear head on a backbone."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = LinearHead(backbone.feature_dim)

    def features(self, images: Tensor) -> Tensor:
        """Return features of shape (B, feature_dim)."""
        return self.backbone(images)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (B, num_classes)."""
        return self.head(self.features(images))
