"""Memories of old training images: exemplars that are chosen when a task ends, and a reservoir filled step by step.

Herding follows iCaRL (Rebuffi et al., 2017): every prefix of the order of exemplars has a mean close to the class
mean, hence shrinking a class keeps its first images.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

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
    vectors = features.detach().double()  # rounding must not choose between near-equal images
    # The epsilon of PILOT and PyCIL; it also keeps rows of zeros finite.
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


class _Memory:
    """A budget of images, either in all or for each class."""

    def __init__(self, total: int | None, per_class: int | None, seed: int) -> None:
        if (total is None) == (per_class is None):
            raise ValueError(f"Give exactly one of total and per_class, got {total!r} and {per_class!r}.")
        self.total, self.per_class, self.seed = total, per_class, seed

    def _find(self, rows: Sequence[int], labels: Sequence[int], train: ImageSet) -> list[int]:
        """Return where the rows of a checkpoint are among training images; raise a `DataError` if they are not."""
        position = {row: index for index, row in enumerate(train.rows.tolist())}
        for row, label in zip(rows, labels, strict=True):
            if row not in position or train.labels[position[row]] != label:
                raise DataError(
                    f"Stored row {row} of class {label} is not in the training images; the checkpoint belongs to"
                    " another dataset, subsample or class order."
                )
        return [position[row] for row in rows]


class ExemplarMemory(_Memory):
    """Keep exemplars of every class seen so far within a budget.

    Streams with shared domain labels bring a class again in a later task; its quota is then divided evenly among the
    tasks that brought it. A class with fewer images than its quota keeps them all.

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
        super().__init__(total, per_class, seed)
        self.selection = selection
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
        """Shrink the stored classes to their new quota and add exemplars of a finished task.

        Herding needs the features of ``train``, (len(train), d), in evaluation mode under the test transform.
        """
        if self.selection == "herding" and (features is None or len(features) != len(train)):
            got = "none" if features is None else len(features)
            raise ValueError(f"Herding needs one feature row for each of {len(train)} images, got {got}.")
        positions = {label: np.flatnonzero(train.labels == label) for label in np.unique(train.labels).tolist()}
        quota = self._quotas([*(label for label, _ in self._exemplars), *positions])
        # Every prefix of a herded order is a good choice, so shrinking takes the first ones.
        kept = {
            # A class within its quota is passed on as it is: selecting would copy.
            key: images if len(images) <= quota[key[0]] else images.select(np.arange(quota[key[0]]))
            for key, images in self._exemplars.items()
        }
        for label, where in positions.items():
            order = self._order(label, where, features, min(quota[label], len(where)))
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
        rows, labels, updates = (column.tolist() for column in state["exemplars"].unbind(1))
        where: dict[tuple[int, int], list[int]] = {}
        for index, label, update in zip(self._find(rows, labels, train), labels, updates, strict=True):
            where.setdefault((label, update), []).append(index)
        # In stored order: the loader shuffles positions, and a resumed run must find the same image at each.
        self._exemplars = {key: train.select(indices) for key, indices in where.items()}
        self.num_updates = state["num_updates"]

    def _quotas(self, labels: Iterable[int]) -> dict[int, int]:
        """Return the images of each class and task, given the label of every pair of the two."""
        parts = Counter(labels)
        quota, most = self.quota(len(parts)), max(parts.values())
        if quota < most:
            raise ValueError(
                f"A share of {quota} exemplars per class cannot cover the {most} tasks that brought the class; raise"
                " the budget."
            )
        return {label: quota // count for label, count in parts.items()}

    def _order(self, label: int, where: Indices, features: Tensor | None, num: int) -> Indices:
        if self.selection == "random":
            return np.random.default_rng((self.seed, self.num_updates, label)).permutation(len(where))[:num]
        assert features is not None
        return np.asarray(herding(features[torch.from_numpy(where)], num))


class ReservoirMemory(_Memory):
    """Keep a uniform sample of all images seen so far, filled batch by batch, with tensors that belong to them.

    With a fixed total, image number n replaces a stored one with probability total / n (reservoir sampling): frequent
    classes have more images. ``balanced``, or a fixed number per class, keeps a reservoir for each class. Random
    numbers are a function of the seed and the number of images seen, so a checkpoint needs no generator state.

    Args:
        total: Images in all; a balanced memory divides them evenly. Give either this or ``per_class``.
        per_class: Images of each class.
        balanced: A reservoir for each class; always so with ``per_class``.
        seed: Seed of the random choice.

    >>> memory = ReservoirMemory(total=2)
    >>> memory.observe(torch.arange(5), torch.zeros(5, dtype=torch.long))
    >>> len(memory), memory.num_seen
    (2, 5)
    """

    @checked
    def __init__(
        self,
        *,
        total: Count | None = None,
        per_class: Count | None = None,
        balanced: bool = False,
        seed: CountOrZero = 0,
    ) -> None:
        super().__init__(total, per_class, seed)
        self.balanced = balanced or per_class is not None
        self.counts: Counter[int] = Counter()
        """Images seen, by class; all under one key if the memory is not balanced."""
        self.slots: dict[int, list[_Stored]] = {}
        """Stored images, by the same keys."""

    def __len__(self) -> int:
        return sum(map(len, self.slots.values()))

    @property
    def num_seen(self) -> int:
        """Images seen so far."""
        return self.counts.total()

    def observe(self, rows: Tensor, labels: Tensor, **tensors: Tensor) -> None:
        """Let the images of a step in, each with its row of every tensor."""
        rng = np.random.default_rng((self.seed, self.num_seen))
        kept = {name: value.detach().cpu() for name, value in tensors.items()}
        for index, (row, label) in enumerate(zip(rows.tolist(), labels.tolist(), strict=True)):
            key = label if self.balanced else 0
            if key not in self.slots:
                self._make_room(key, rng)
            slots, capacity = self.slots[key], self._capacity
            self.counts[key] += 1
            place = len(slots) if len(slots) < capacity else int(rng.integers(self.counts[key]))
            if place < capacity:
                # Clones: views would keep the tensors of the whole batch alive.
                slots[place : place + 1] = [_Stored(row, label, {name: kept[name][index].clone() for name in kept})]

    @property
    def _capacity(self) -> int:
        """Images of each reservoir."""
        if self.per_class is not None:
            return self.per_class
        assert self.total is not None
        return max(1, self.total // max(1, len(self.slots)))

    def _make_room(self, key: int, rng: np.random.Generator) -> None:
        """Begin a reservoir; the others shrink at random to what is left for each."""
        self.slots[key] = []
        for slots in self.slots.values():
            while len(slots) > self._capacity:
                # A random part of a uniform sample is uniform.
                slots.pop(int(rng.integers(len(slots))))

    def draw(self, num: int, rng: np.random.Generator, like: ImageSet) -> tuple[ImageSet, dict[str, Tensor]]:
        """Return ``num`` stored images and their tensors: without repeats while there are enough.

        ``like`` is any set of the split that the images are from. Tensors of unequal width, such as logits of a head
        that has grown since, are padded with zeros; their widths are under the name ``<name>_width``.
        """
        # By key, not by arrival: checkpoints restore them in this order, and a resumed run must draw the same images.
        stored = [item for key in sorted(self.slots) for item in self.slots[key]]
        rounds = -(-num // len(stored))
        chosen = np.concatenate([rng.permutation(len(stored)) for _ in range(rounds)])[:num]
        items = [stored[index] for index in chosen]
        images = ImageSet(like.store, [item.label for item in items], rows=[item.row for item in items])
        return images, _padded(items)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds; pixels stay in the dataset."""
        keys = sorted(self.slots)
        items = [item for key in keys for item in self.slots[key]]
        return {
            "keys": keys,
            "counts": [self.counts[key] for key in keys],
            "sizes": [len(self.slots[key]) for key in keys],
            "rows": torch.tensor([item.row for item in items], dtype=torch.int64),
            "labels": torch.tensor([item.label for item in items], dtype=torch.int64),
            "tensors": _padded(items),
        }

    def load_state(self, state: Mapping[str, Any], train: ImageSet) -> None:
        """Restore what `state` returned; ``train`` holds every row, as ``stream.all_train``."""
        rows, labels = state["rows"].tolist(), state["labels"].tolist()
        self._find(rows, labels, train)
        tensors = state["tensors"]
        names = [name for name in tensors if not name.endswith(_WIDTH)]
        items = [
            _Stored(row, label, {name: tensors[name][i, : tensors[name + _WIDTH][i]].clone() for name in names})
            for i, (row, label) in enumerate(zip(rows, labels, strict=True))
        ]
        self.counts = Counter(dict(zip(state["keys"], state["counts"], strict=True)))
        ends = np.cumsum([0, *state["sizes"]]).tolist()
        self.slots = {key: items[start:end] for key, (start, end) in zip(state["keys"], pairwise(ends), strict=True)}


class _Stored(NamedTuple):
    """An image in a reservoir."""

    row: int
    label: int
    tensors: dict[str, Tensor]


_WIDTH = "_width"


def _padded(items: Sequence[_Stored]) -> dict[str, Tensor]:
    """Return the vectors of all items by name, padded to one width, and the width of each."""
    found: dict[str, Tensor] = {}
    for name in items[0].tensors if items else ():
        vectors = [item.tensors[name] for item in items]
        found[name] = torch.nn.utils.rnn.pad_sequence(vectors, batch_first=True)
        found[name + _WIDTH] = torch.tensor([len(vector) for vector in vectors])
    return found
