"""Streams: a dataset cut into a sequence of tasks.

Protocol of the field (design notes: class order, B-m Inc-n): the class order is one permutation of NumPy's
legacy generator, a label of the stream is the position of the original label in that order, the first task
takes ``initial`` classes, every later one ``increment``, and the last one what is left.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from cflat._errors import DataError
from cflat._ranges import Count, Fraction, check, checked
from cflat._registry import require_known
from cflat.data.dataset import Dataset, image_groups, share_of, validate_dataset
from cflat.data.images import ImageSet
from cflat.data.pixels import Indices, PixelStore

logger = logging.getLogger(__name__)

Scenario: TypeAlias = Literal["class", "task", "domain", "blurry"]
DomainLabels: TypeAlias = Literal["shared", "growing"]
Split: TypeAlias = Literal["test", "validation"]
"""Images that accuracy is measured on."""

DEFAULT_NUM_TASKS = 5
LONE_CLASSES = (
    "%d of %d tasks of %s have a single class: there is nothing to tell apart in them, and a method that learns"
    " from one task at a time learns nothing. Choose stream.initial and stream.increment so that each has two."
)
_NOISE, _BLUR = 4, 5
"""Keys of the random numbers of label noise and blurred borders, beside those of `Dataset`."""


@dataclass(frozen=True)
class Task:
    """One step of a stream: the images to learn from, and those to test or validate what was learned."""

    index: int
    name: str
    classes: range
    """Stream labels that this task brings; with shared domain labels, every task has the whole range. A task of a
    blurry stream has images of earlier classes besides, and may bring none."""
    train: ImageSet
    test: ImageSet
    """Test images of this task alone."""
    validation: ImageSet | None = None
    """Images to choose settings by, cut from the training images; None if none were kept aside."""

    def images(self, split: Split) -> ImageSet:
        """Return the images that a split of this task is measured on.

        Raises:
            ValueError: If there are no validation images.
        """
        chosen = self.test if split == "test" else self.validation
        if chosen is None:
            raise ValueError("The stream has no validation images; keep some aside with validation=0.2.")
        return chosen

    @property
    def num_classes(self) -> int:
        """Number of classes in this task."""
        return len(self.classes)


@dataclass(frozen=True)
class Stream:
    """A sequence of tasks over one label space."""

    scenario: Scenario
    tasks: tuple[Task, ...]
    num_classes: int
    """Number of stream labels after the last task, i.e. outputs of the final head."""
    class_names: tuple[str, ...]
    """Name of each stream label."""
    label_modulus: int | None = None
    """Set when domains have labels of their own: a prediction is right if it equals the label modulo this."""

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return len(self.tasks)

    @property
    def shares_labels(self) -> bool:
        """Whether every task has the same classes: a task can then be answered before it is learned."""
        return self.scenario == "domain" and self.label_modulus is None

    @checked
    def first(self, num_tasks: Count) -> Stream:
        """Return the stream that ends after its first tasks; all of it if it has no more."""
        tasks = self.tasks[:num_tasks]
        count = tasks[-1].classes.stop
        return replace(self, tasks=tasks, num_classes=count, class_names=self.class_names[:count])

    @cached_property
    def all_train(self) -> ImageSet:
        """All training images: where an exemplar memory finds its rows again after a resume."""
        return ImageSet.concat([task.train for task in self.tasks])

    def fingerprint(self) -> str:
        """Hash the order, the splits and the images; equal streams have equal fingerprints on any machine."""
        digest = hashlib.blake2b(digest_size=16)
        header = (self.scenario, self.num_classes, self.label_modulus, self.class_names)
        digest.update(repr(header).encode(errors="surrogateescape"))
        # Stores are hashed once, for the rows that the stream uses: tasks share them.
        used: dict[PixelStore, list[Indices]] = {}
        for task in self.tasks:
            digest.update(repr((task.index, task.name, task.classes)).encode(errors="surrogateescape"))
            for images in (task.train, task.test, *([] if task.validation is None else [task.validation])):
                # In one byte order: fingerprints are compared across machines.
                digest.update(images.rows.astype("<i8").tobytes())
                digest.update(images.labels.astype("<i8").tobytes())
                used.setdefault(images.store, []).append(images.rows)
        for store, rows in used.items():
            digest.update(store.fingerprint(np.concatenate(rows)).encode())
        return digest.hexdigest()


def class_order(num_classes: int, seed: int | None = 1993) -> Indices:
    """Return the original label at each position of the stream: NumPy's legacy permutation, or the identity.

    >>> class_order(100)[:5].tolist()
    [68, 56, 78, 8, 23]
    """
    if seed is None:
        return np.arange(num_classes)
    return np.random.RandomState(seed).permutation(num_classes).astype(np.int64)


@checked
def task_sizes(num_classes: int, initial: int, increment: Count) -> list[int]:
    """Return the number of classes of each task; ``initial`` 0 means as many as ``increment``.

    >>> task_sizes(100, 50, 20)
    [50, 20, 20, 10]
    """
    check("initial", initial, at_least=0, at_most=num_classes, integer=True)
    initial = initial or min(increment, num_classes)
    num_full, remainder = divmod(num_classes - initial, increment)
    return [initial, *[increment] * num_full, *([remainder] if remainder else [])]


def build_stream(
    dataset: Dataset,
    scenario: Scenario = "class",
    *,
    initial: int | None = None,
    increment: int | None = None,
    order_seed: int | None = 1993,
    task_order_seed: int | None = None,
    labels: DomainLabels = "shared",
    domain_order: Sequence[str] | None = None,
    disjoint: float = 0.5,
    blur: float = 0.1,
) -> Stream:
    """Cut a dataset into tasks.

    Args:
        dataset: What to cut; it is validated first.
        scenario: ``class``: new classes per task, no task id at test time; ``task``: the same tasks, task
            id known at test time; ``domain``: the same classes in a new domain per task; ``blurry``: new classes per
            task whose images are partly spread over all tasks.
        initial: Classes of the first task (0: as many as ``increment``); by default the dataset's usual split.
        increment: Classes of every later task.
        order_seed: Seed of the class order; ``None`` keeps the dataset's order. Domain streams always keep it.
        task_order_seed: Shuffle the finished tasks (or domains) with this seed.
        labels: Domain streams only. ``shared``: one label per class; ``growing``: class + num_classes * task, so that
            the head grows with every domain.
        domain_order: Domain streams only: names of the domains to use, in order.
        disjoint: Blurry streams only: fraction of the classes whose images are all in one task, in [0, 1].
        blur: Blurry streams only: fraction of the images of every other class that is spread over all tasks, in [0, 1].

    Raises:
        DataError: If the dataset breaks a rule, or has no domains and ``scenario`` is ``domain``.
    """
    require_known("scenario", scenario, get_args(Scenario))
    validate_dataset(dataset)
    if scenario == "domain":
        stream = _domain_stream(dataset, labels, domain_order, task_order_seed)
    else:
        usual = dataset.split or _even_split(dataset.num_classes)
        chosen = (usual[0] if initial is None else initial, usual[1] if increment is None else increment)
        sizes = task_sizes(dataset.num_classes, *chosen)
        if scenario != "blurry" and min(sizes) == 1:
            logger.warning(LONE_CLASSES, sizes.count(1), len(sizes), dataset.name)
        groups = np.split(class_order(dataset.num_classes, order_seed), np.cumsum(sizes)[:-1])
        groups = [groups[i] for i in class_order(len(groups), task_order_seed)]
        if scenario == "blurry":
            # Skips the check below: a task that brings no class has nothing to be measured on.
            return _blurry_stream(dataset, groups, order_seed or 0, disjoint, blur)
        stream = _class_stream(dataset, scenario, groups)
    for task in stream.tasks if dataset.validation is not None else ():
        if task.validation is None or len(task.validation) == 0:
            raise DataError(
                f"Task {task.name!r} of dataset {dataset.name!r} has no validation image: none of its classes has two"
                " training images; add images, or do without validation."
            )
    return stream


def _class_stream(dataset: Dataset, scenario: Scenario, groups: Sequence[Indices]) -> Stream:
    order, ranges = np.concatenate(groups), _consecutive([len(group) for group in groups])
    tasks = [
        Task(i, f"classes {r.start}-{r.stop - 1}", r, *images)
        for i, (r, *images) in enumerate(zip(ranges, *_splits(dataset, order, ranges), strict=True))
    ]
    for task in tasks:
        if len(task.test) == 0:
            raise DataError(
                f"Task {task.index} ({task.name}) of dataset {dataset.name!r} has no test images: none of its classes"
                " has any. Add test images, or put more classes into a task with stream.increment."
            )
    names = tuple(dataset.class_names[label] for label in order)
    return Stream(scenario, tuple(tasks), dataset.num_classes, names)


def _blurry_stream(dataset: Dataset, groups: Sequence[Indices], seed: int, disjoint: float, blur: float) -> Stream:
    """Let tasks overlap (Si-Blurry, Moon et al., 2023): labels follow the order in which classes first appear."""
    check("disjoint", disjoint, at_least=0, at_most=1)
    check("blur", blur, at_least=0, at_most=1)
    home = np.empty(dataset.num_classes, dtype=np.int64)
    for index, group in enumerate(groups):
        home[group] = index
    task_of = _spread_images(dataset.train, home, seed, disjoint, blur)
    first = np.full(dataset.num_classes, len(groups))
    # Labels repeat: with plain indexing the last image of a class would decide.
    np.minimum.at(first, dataset.train.labels, task_of)
    order = np.concatenate(groups)
    order = order[np.argsort(first[order], kind="stable")]  # classes that appear together keep their order
    ranges = _consecutive(np.bincount(first, minlength=len(groups)).tolist())
    train = dataset.train.with_labels(np.argsort(order)[dataset.train.labels])
    tasks = []
    for i, (classes, _, *measured) in enumerate(zip(ranges, *_splits(dataset, order, ranges), strict=True)):
        tasks.append(Task(i, f"task {i}", classes, train.select(task_of == i), *measured))
        if len(tasks[i].train) == 0:
            raise DataError(f"Task {i} of dataset {dataset.name!r} has no images; use fewer tasks.")
    return Stream("blurry", tuple(tasks), dataset.num_classes, tuple(dataset.class_names[label] for label in order))


def _spread_images(images: ImageSet, home: Indices, seed: int, disjoint: float, blur: float) -> Indices:
    """Return the task of each image: that of its class, or any task for the blurred images of shared classes."""
    rng = np.random.default_rng((seed, _BLUR))
    shared = rng.permutation(len(home))[round(disjoint * len(home)) :]
    task_of = home[images.labels]
    for label in np.sort(shared):
        positions = rng.permutation(np.flatnonzero(images.labels == label))
        moved = positions[: round(blur * len(positions))]
        task_of[moved] = rng.integers(home.max() + 1, size=len(moved))
    return task_of


def _even_split(num_classes: int) -> tuple[int, int]:
    """Return an even split whose tasks all have at least two classes, unless there are fewer than four.

    >>> [task_sizes(count, *_even_split(count)) for count in (2, 3, 5, 7, 10, 13)]
    [[1, 1], [2, 1], [3, 2], [3, 2, 2], [2, 2, 2, 2, 2], [4, 3, 3, 3]]
    """
    if num_classes < 4:
        half = -(-num_classes // 2)
        return half, half  # two tasks: one would be no stream
    size = max(2, -(-num_classes // DEFAULT_NUM_TASKS))
    is_left = (num_classes - size) % size == 1
    return size + is_left, size


def _consecutive(sizes: Sequence[int]) -> list[range]:
    """Return ranges of these sizes, one after the other.

    >>> _consecutive([2, 0, 3])
    [range(0, 2), range(2, 2), range(2, 5)]
    """
    return [range(start, stop) for start, stop in pairwise(np.cumsum([0, *sizes]).tolist())]


def _splits(dataset: Dataset, order: Indices, ranges: Sequence[range]) -> list[Sequence[Any]]:
    """Return the train, test and validation images of each range of stream labels, which are positions in ``order``."""
    label_of = np.argsort(order)
    found: list[Sequence[Any]] = []
    for images in (dataset.train, dataset.test, dataset.validation):
        if images is None:
            found.append([None] * len(ranges))
            continue
        images = images.with_labels(label_of[images.labels])
        # One sort for all tasks: a mask per task would take quadratic time on long streams.
        by_label = np.argsort(images.labels, kind="stable")
        bounds = np.searchsorted(images.labels[by_label], [bound for r in ranges for bound in (r.start, r.stop)])
        # Sorted again: the images of a task stay in the order of the dataset.
        found.append([images.select(np.sort(by_label[start:stop])) for start, stop in bounds.reshape(-1, 2)])
    return found


def _domain_stream(
    dataset: Dataset, labels: DomainLabels, domain_order: Sequence[str] | None, task_order_seed: int | None
) -> Stream:
    if labels not in get_args(DomainLabels):
        raise ValueError(f"labels must be 'shared' or 'growing', got {labels!r}.")
    domains = _ordered_domains(dataset, domain_order)
    count, is_growing = dataset.num_classes, labels == "growing"
    tasks = []
    for index, position in enumerate(class_order(len(domains), task_order_seed)):
        domain, name = domains[position]
        offset = index * count if is_growing else 0
        train, test, validation = (
            None if images is None else _of_domain(images, domain, offset)
            for images in (dataset.train, dataset.test, dataset.validation)
        )
        if not train or not test:
            split = "test" if train else "train"
            raise DataError(f"Domain {name!r} of dataset {dataset.name!r} has no {split} images.")
        tasks.append(Task(index, name, range(offset, offset + count), train, test, validation))
    if not is_growing:
        return Stream("domain", tuple(tasks), count, dataset.class_names)
    for task in tasks:
        missing = np.setdiff1d(task.classes, task.train.labels)
        if len(missing):  # its output would never be trained
            raise DataError(
                f"Domain {task.name!r} of dataset {dataset.name!r} has no training image of class"
                f" {dataset.class_names[missing[0] % count]!r}; labels='growing' needs every class in every domain,"
                " labels='shared' does not."
            )
    names = tuple(f"{task.name}/{name}" for task in tasks for name in dataset.class_names)
    return Stream("domain", tuple(tasks), len(names), names, label_modulus=count)


def _ordered_domains(dataset: Dataset, wanted: Sequence[str] | None) -> list[tuple[int, str]]:
    if dataset.domain_names is None or dataset.train.domains is None or dataset.test.domains is None:
        raise DataError(
            f"Dataset {dataset.name!r} has no domains; a domain stream needs file lists per domain"
            " (domains:PATH) or an npz file with domain_train and domain_test."
        )
    known = list(dataset.domain_names)
    for name in wanted or ():
        require_known("domain", name, known)
    if wanted is not None and (not wanted or len(set(wanted)) < len(wanted)):
        raise ValueError(f"domain_order must name domains once each, got {list(wanted)}.")
    return [(known.index(name), name) for name in wanted or known]


def _of_domain(images: ImageSet, domain: int, label_offset: int) -> ImageSet:
    chosen = images.select(images.domains == domain)
    return chosen.with_labels(chosen.labels + label_offset)


@checked
def with_label_noise(stream: Stream, label_noise: Fraction, seed: int = 0) -> Stream:
    """Return the stream with a fraction of each class's training labels (and domain's) replaced, evenly at random.

    The new label is another class of the same task: images stay in their task, and no class of a later task leaks.
    Every class keeps at least one image of its own. Test and validation images keep their labels. ``label_noise`` is
    the fraction, in [0, 1); 0 returns the stream itself.

    Raises:
        DataError: If a task has a single class: there is no other label to give.
    """
    if label_noise == 0:
        return stream
    return replace(stream, tasks=tuple(_noisy(task, label_noise, seed) for task in stream.tasks))


def _noisy(task: Task, share: float, seed: int) -> Task:
    if task.num_classes < 2:
        raise DataError(
            f"Label noise needs two classes in every task, task {task.name!r} has one; raise initial and increment."
        )
    labels = task.train.labels.copy()
    for (label, domain), positions in image_groups(task.train).items():
        # domain + 1: seeds must not be negative, and -1 stands for no domain.
        rng = np.random.default_rng((seed, _NOISE, label, domain + 1))
        wrong = rng.permutation(positions)[: share_of(share, len(positions))]
        others = np.setdiff1d(np.asarray(task.classes), [label])
        labels[wrong] = rng.choice(others, size=len(wrong))
    return replace(task, train=task.train.with_labels(labels))
