"""Exemplar memory: a bounded choice of old training images, by herding or at random.

Herding follows iCaRL (Rebuffi et al., 2017): exemplars are ordered so that every prefix of the order has a
mean close to the class mean, hence shrinking a class keeps its first images.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from cflat._errors import DataError
from cflat._ranges import Count, CountOrZero, check, checked
from cflat.data.images import ImageSet
from cflat.data.pixels import Indices

Selection: TypeAlias = Literal["herding", "random"]


def herding(features: Tensor, num: int) -> Tensor:
    """Return the indices of ``num`` rows whose running mean stays closest to the mean of all rows.

    With L2-normalised rows v_i and their mean mu, step k takes the unused i that minimises
    ``|mu - (v_i + sum of chosen) / k|``. Each step is one matrix-vector product.

    >>> herding(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), 1).tolist()
    [2]
    """
    check("num", num, at_least=0, at_most=len(features), integer=True)
    vectors = features.detach().double()
    vectors = vectors / (vectors.norm(dim=1, keepdim=True) + 1e-8)
    mean = vectors.mean(dim=0)
    penalty = vectors.square().sum(dim=1)  # becomes infinite for rows that are taken
    chosen_sum = torch.zeros_like(mean)
    chosen: list[int] = []
    for step in range(1, num + 1):
        # k^2 |mu - (v_i + s)/k|^2 = |k mu - s|^2 - 2 <k mu - s, v_i> + |v_i|^2, and the first term is common.
        best = int(torch.argmin(penalty - 2 * (vectors @ (step * mean - chosen_sum))))
        chosen.append(best)
        chosen_sum = chosen_sum + vectors[best]
        penalty[best] = torch.inf
    return torch.tensor(chosen, dtype=torch.int64)


class ExemplarMemory:
    """Keep exemplars of every class seen so far within a budget.

    Streams with shared domain labels bring a class again in a later task; the share of that class is then
    divided evenly among the tasks that brought it. A class with fewer images than its share keeps them all.

    Args:
        total: Fixed total: every class gets total // (classes so far). Give either this or ``per_class``.
        per_class: Fixed number per class.
        selection: ``herding`` needs features at `update`; ``random`` does not.
        seed: Seed of the random choice.

    >>> ExemplarMemory(total=2000).quota(num_classes=30)
    66
    """

    @checked
    def __init__(
        self,
        *,
        total: Count | None = None,
        per_class: Count | None = None,
        selection: Selection = "herding",
        seed: CountOrZero = 0,
    ) -> None:
        if (total is None) == (per_class is None):
            raise ValueError(f"Give exactly one of total and per_class, got {total!r} and {per_class!r}.")
        self.total = total
        self.per_class = per_class
        self.selection = selection
        self.seed = seed
        self.num_updates = 0
        self._exemplars: dict[tuple[int, int], ImageSet] = {}  # by (label, update that brought it)

    def __len__(self) -> int:
        return sum(len(images) for images in self._exemplars.values())

    def quota(self, num_classes: int) -> int:
        """Return the images per class when ``num_classes`` are stored.

        Raises:
            ValueError: If the total leaves no image for some class.
        """
        quota = self.per_class if self.total is None else self.total // num_classes
        assert quota is not None
        if quota == 0:
            raise ValueError(f"A memory of {self.total} images cannot hold {num_classes} classes; raise its total.")
        return quota

    def images(self) -> ImageSet:
        """Return all exemplars, task by task and class by class, each in the order of selection."""
        if not self._exemplars:
            raise ValueError("The exemplar memory is empty; call update() after the first task.")
        return ImageSet.concat(list(self._exemplars.values()))

    def rehearse(self, train: ImageSet) -> ImageSet:
        """Return the training images of a task together with all exemplars."""
        return ImageSet.concat([train, *self._exemplars.values()])

    def update(self, train: ImageSet, features: Tensor | None = None) -> None:
        """Shrink the stored classes to their new share and add exemplars of a finished task.

        Herding needs the features of ``train``, (len(train), d), in evaluation mode under the test transform.
        """
        if self.selection == "herding" and (features is None or len(features) != len(train)):
            got = "none" if features is None else len(features)
            raise ValueError(f"Herding needs one feature row for each of {len(train)} images, got {got}.")
        positions = {label: np.flatnonzero(train.labels == label) for label in np.unique(train.labels).tolist()}
        keys = [*self._exemplars, *((label, self.num_updates) for label in positions)]
        share = self._shares(label for label, _ in keys)
        kept = {
            key: images if len(images) <= share[key[0]] else images.select(np.arange(share[key[0]]))
            for key, images in self._exemplars.items()
        }
        for label, where in positions.items():
            order = self._order(label, where, features, min(share[label], len(where)))
            kept[label, self.num_updates] = train.select(where[order])
        self._exemplars = kept
        self.num_updates += 1

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds; pixels stay in the dataset.

        The exemplars are int64 (N, 3) in stored order: row in the train split, stream label, update that brought it.
        """
        columns = [
            np.stack([images.rows, *(np.full(len(images), part) for part in key)], axis=1)
            for key, images in self._exemplars.items()
        ]
        return {
            "exemplars": torch.from_numpy(np.concatenate([np.empty((0, 3), dtype=np.int64), *columns])),
            "num_updates": self.num_updates,
        }

    def load_state(self, state: Mapping[str, Any], train: ImageSet) -> None:
        """Restore the exemplars of a checkpoint from training images that hold every row, as ``stream.all_train``."""
        position = {row: index for index, row in enumerate(train.rows.tolist())}
        where: dict[tuple[int, int], list[int]] = {}
        for row, label, update in state["exemplars"].tolist():
            index = position.get(row)
            if index is None or train.labels[index] != label:
                raise DataError(
                    f"Exemplar row {row} of class {label} is not in the training images; the checkpoint"
                    " belongs to another dataset, subsample or class order."
                )
            where.setdefault((label, update), []).append(index)
        self._exemplars = {key: train.select(indices) for key, indices in where.items()}
        self.num_updates = state["num_updates"]

    def _shares(self, labels: Iterable[int]) -> dict[int, int]:
        parts = Counter(labels)
        quota = self.quota(len(parts))
        if quota < max(parts.values()):
            raise ValueError(
                f"A share of {quota} exemplars per class cannot cover the {max(parts.values())} tasks that"
                " brought the class; raise the budget."
            )
        return {label: quota // count for label, count in parts.items()}

    def _order(self, label: int, where: Indices, features: Tensor | None, num: int) -> Indices:
        if self.selection == "random":
            return np.random.default_rng((self.seed, self.num_updates, label)).permutation(len(where))[:num]
        assert features is not None
        return np.asarray(herding(features[torch.from_numpy(where)], num))
