"""`Dataset`: a train and a test split over one list of classes, and the rules that both must keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cflat._errors import DataError
from cflat._ranges import Count, Fraction, checked
from cflat.data.images import ImageSet
from cflat.data.pixels import Indices

Report: TypeAlias = Callable[[str], None]
"""Receives each problem that is found: `refuse` raises the first, ``list.append`` collects them all."""

_HELD_OUT = 3
"""Key of the validation images; 0 to 2 are those of the subsamples."""


def refuse(problem: str) -> None:
    """Raise the problem as a `DataError`."""
    raise DataError(problem)


@dataclass(frozen=True)
class Dataset:
    """Two splits of labelled images; original labels are indices into ``class_names``."""

    name: str
    train: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...] | None = None
    """Names of the domains that ``train.domains`` and ``test.domains`` index."""
    split: tuple[int, int] | None = None
    """Usual (initial, increment) of a class-incremental stream."""
    validation: ImageSet | None = None
    """Training images kept aside to choose settings by; no longer in ``train``."""

    @property
    def num_classes(self) -> int:
        """Number of classes, over all domains."""
        return len(self.class_names)

    @checked
    def subsample(
        self,
        train_per_class: Count | None,
        test_per_class: Count | None,
        seed: int = 0,
        *,
        validation_per_class: Count | None = None,
    ) -> Dataset:
        """Keep at most so many images of each class (and domain) in each split, chosen at random.

        A smaller choice under the same seed is a part of a larger one. Row order is kept.
        """
        wanted = {"train": train_per_class, "test": test_per_class, "validation": validation_per_class}
        kept: dict[str, ImageSet] = {}
        for key, (split, per_class) in enumerate(wanted.items()):
            images = getattr(self, split)
            if images is not None and per_class is not None:
                kept[split] = images.select(_chosen(images, (seed, key), partial(min, per_class)))
        return replace(self, **kept)  # type: ignore[arg-type]

    @checked
    def hold_out(self, validation: Fraction, seed: int = 0) -> Dataset:
        """Move a fraction of the training images of each class (and domain) to ``validation``.

        At least one image of each group is moved and at least one stays; a group of one image stays whole. 0 moves
        nothing.
        """
        if validation == 0:
            return self
        is_held = np.zeros(len(self.train), dtype=bool)
        is_held[_chosen(self.train, (seed, _HELD_OUT), lambda count: share_of(validation, count))] = True
        return replace(self, train=self.train.select(~is_held), validation=self.train.select(is_held))


def share_of(share: float, count: int) -> int:
    """Return how many of ``count`` images a fraction above 0 is: at least one, and never all.

    >>> [share_of(0.2, count) for count in (1, 2, 10, 13)]
    [0, 1, 2, 3]
    """
    # Halves go up: round() would send them to the even neighbour.
    return min(count - 1, max(1, int(share * count + 0.5)))


def image_groups(images: ImageSet) -> dict[tuple[int, int], Indices]:
    """Return the positions of each (label, domain), in ascending order; without domains, that is -1."""
    domains = np.full(len(images), -1) if images.domains is None else images.domains
    order = np.lexsort((domains, images.labels))  # one sort instead of a mask for each group
    keys = np.stack([images.labels[order], domains[order]], axis=1)
    starts = np.flatnonzero(np.any(np.diff(keys, axis=0), axis=1)) + 1
    return {
        (int(keys[start, 0]), int(keys[start, 1])): order[start:stop]
        for start, stop in zip([0, *starts], [*starts, len(order)], strict=True)
        # Of an empty set, the only range is empty.
        if stop > start
    }


def _chosen(images: ImageSet, key: Sequence[int], how_many: Callable[[int], int]) -> Indices:
    """Return positions of random images, ``how_many(count)`` of each (label, domain) that has ``count``."""
    # Seeds must not be negative, hence domain + 1: -1 stands for no domain.
    # A generator per group: images of one class do not depend on which other classes the dataset has.
    chosen = [
        np.random.default_rng((*key, label, domain + 1)).permutation(positions)[: how_many(len(positions))]
        for (label, domain), positions in image_groups(images).items()
    ]
    # np.concatenate needs one array, and an empty set has no groups.
    return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *chosen]))


def validate_dataset(dataset: Dataset, report: Report = refuse) -> None:
    """Report empty splits, labels and domains outside their lists, and classes without training images."""
    num_domains = len(dataset.domain_names or ())
    for split, images in (("train", dataset.train), ("test", dataset.test)):
        where = f"the {split} split of dataset {dataset.name!r}"
        if len(images) == 0:
            report(f"There are no images in {where}.")
        _validate_range(images, "Label", images.labels, dataset.num_classes, where, report)
        if images.domains is not None:
            _validate_range(images, "Domain", images.domains, num_domains, where, report)
    labels = np.arange(dataset.num_classes)
    trained, tested = np.isin(labels, dataset.train.labels), np.isin(labels, dataset.test.labels)
    for which, fact in (
        (~trained & tested, "in the test split but not in the train split; add training images or remove it"),
        (~trained & ~tested, "empty: no image has its label; add images or remove it"),
    ):
        wrong = np.flatnonzero(which)
        if len(wrong):
            more = f" and {len(wrong) - 1} other classes are" if len(wrong) > 1 else " is"
            name = dataset.class_names[wrong[0]]
            report(f"Class {name!r} (label {wrong[0]}) of dataset {dataset.name!r}{more} {fact}.")


def count_labels(labels: npt.ArrayLike, where: str) -> int:
    """Return the number of classes that training labels 0, 1, ... speak of.

    Every class needs a training image: a label that so many images do not allow raises a `DataError`.
    """
    values = np.asarray(labels)
    highest = int(values.max()) if values.size else -1
    # Callers make a name for each class next: for a stray label of 2**40 they would fill the memory.
    if highest >= len(values):
        raise DataError(
            f"Label {highest} in {where} is out of range: {len(values)} training images allow at most labels"
            f" 0 to {len(values) - 1}."
        )
    return highest + 1


def _validate_range(images: ImageSet, what: str, values: Indices, count: int, where: str, report: Report) -> None:
    wrong = np.flatnonzero((values < 0) | (values >= count))
    if len(wrong):
        example = images.store.describe(int(images.rows[wrong[0]]))
        report(
            f"{what} {values[wrong[0]]} of {example} in {where} is out of range: expected 0 to {count - 1}"
            f" ({len(wrong)} such images)."
        )
