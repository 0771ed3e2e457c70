"""One step's worth of images: what a loader yields and a method reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Transformed images with their labels, row numbers and whatever a method prepared for them.

    >>> batch = Batch(torch.zeros(2, 3, 8, 8), torch.tensor([0, 1]), torch.tensor([5, 9]))
    >>> len(batch.with_(teacher=torch.zeros(2, 4)))
    2
    """

    images: Tensor
    """Float images, (B, 3, H, W)."""
    labels: Tensor
    """Labels of the stream, int64, (B,)."""
    rows: Tensor
    """Row of each image in its dataset split, int64, (B,): the key of per-image caches."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """What ``Method.prepare`` added, each with a row for every image: teacher logits, query features, ..."""
    total: int | None = None
    """Images of the whole step, where several ranks share it; None: these are all."""
    is_filler: bool = False
    """Whether this rank has no image of the step: it keeps step with another's, which counts for nothing."""

    @property
    def share(self) -> float:
        """The part of the step's images that are in this batch; the shares of all ranks add up to 1."""
        return 0.0 if self.is_filler else 1.0 if self.total is None else len(self) / self.total

    def __len__(self) -> int:
        return len(self.labels)

    def with_(self, **extras: Tensor) -> Batch:
        """Return a batch that carries these named tensors as well."""
        return replace(self, extras={**self.extras, **extras})

    def without_labels(self) -> Batch:
        """Return the batch as a method may see it at test time: every label is -1."""
        return replace(self, labels=torch.full_like(self.labels, -1))

    def split(self, num_parts: int) -> list[Batch]:
        """Return views of the batch in parts of nearly equal size, the larger ones first.

        Raises:
            ValueError: If something that a method prepared has no row for every image.
        """
        for name, value in self.extras.items():
            if value.ndim == 0 or len(value) != len(self):
                raise ValueError(
                    f"A batch of {len(self)} images cannot be split: its prepared tensor {name!r} has the shape "
                    f"{tuple(value.shape)}. Let Method.prepare() return tensors with one row for each image."
                )
        parts = [value.tensor_split(num_parts) for value in (self.images, self.labels, self.rows)]
        extras = {name: value.tensor_split(num_parts) for name, value in self.extras.items()}
        return [
            Batch(images, labels, rows, {name: values[index] for name, values in extras.items()})
            for index, (images, labels, rows) in enumerate(zip(*parts, strict=True))
        ]

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with every tensor on ``device``; copies from pinned memory do not block."""
        images, labels, rows = (part.to(device, non_blocking=True) for part in (self.images, self.labels, self.rows))
        extras = {name: value.to(device, non_blocking=True) for name, value in self.extras.items()}
        return replace(self, images=images, labels=labels, rows=rows, extras=extras)
