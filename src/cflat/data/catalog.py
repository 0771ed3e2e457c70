"""The table of datasets, and `load_dataset`.

A dataset is one file in ``datasets/`` that registers a `DatasetSpec` with its loader. Loaders pass every
problem to ``source.report``: loading stops at the first, ``check_dataset`` collects them all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cflat._errors import ConfigError, DataError
from cflat._registry import Registry
from cflat.data.dataset import Dataset, Report, refuse, validate_dataset
from cflat.data.images import ImageSet
from cflat.data.pixels import DEFAULT_CACHE_BYTES, DecodedCache, FilePixels

ROOT_VARIABLE = "CFLAT_DATA"


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """What is known about a dataset before its files are read."""

    name: str
    title: str
    layout: str
    """Where the files are expected, below the data root or the given path."""
    licence: str
    num_classes: int | None = None
    num_train: int | None = None
    num_test: int | None = None
    split: tuple[int, int] | None = None
    """(initial, increment) of the class-incremental stream in the paper."""
    domains: tuple[str, ...] = ()
    preset: str = "pilot"
    """Input preset that suits the images."""
    places: tuple[str, ...] = ()
    """File or folder names below the root; the first that exists is read."""
    takes_path: bool = False
    """Named as ``name:PATH`` instead of being looked up below the root."""
    holds_vectors: bool = False
    """Whether it holds a vector for each image, and no pixels."""

    @property
    def is_embedded(self) -> bool:
        """Whether its images, small and grey, are always there: no files are needed."""
        return not self.places and not self.takes_path

    @property
    def is_light(self) -> bool:
        """Whether a run on all of it takes seconds: the embedded digits, and vectors."""
        return self.is_embedded or self.holds_vectors


@dataclass(frozen=True)
class Source:
    """What a loader is given: where to look, how to keep images, and where to report problems."""

    spec: DatasetSpec
    root: Path | None = None
    path: Path | None = None
    short_side: int | None = None
    cache: DecodedCache = field(default_factory=DecodedCache)
    num_workers: int = 0
    report: Report = refuse

    def find(self) -> Path:
        """Return the file or folder to read; raise a `DataError` if there is no root, or nothing below it."""
        if self.path is not None:
            if not self.path.exists():
                raise DataError(f"{str(self.path)!r} does not exist. Expected {self.spec.layout}.")
            return self.path
        title = self.spec.title
        if self.root is None:
            raise DataError(f"{title} needs a data root: give one, or set ${ROOT_VARIABLE}. See docs/data.md.")
        if not self.root.is_dir():
            raise DataError(f"The data root {str(self.root)!r} for {title} is not a folder.")
        for place in self.spec.places:
            if (self.root / place).exists():
                return self.root / place
        raise DataError(f"{title} not found under {str(self.root)!r}. Expected {self.spec.layout}; see docs/data.md.")

    def images(
        self, root: Path, paths: Sequence[str], labels: Sequence[int], domains: Sequence[int] | None = None
    ) -> ImageSet:
        """Return an image set over files below ``root``."""
        store = FilePixels(root, paths, short_side=self.short_side, cache=self.cache, num_workers=self.num_workers)
        return ImageSet(store, labels, domains=domains)


Loader = Callable[[Source], Dataset]

DATASETS: Registry[tuple[DatasetSpec, Loader]] = Registry("dataset")


def register_dataset(spec: DatasetSpec) -> Callable[[Loader], Loader]:
    """Enter the decorated loader into the catalogue."""

    def enter(loader: Loader) -> Loader:
        DATASETS.add(spec.name, (spec, loader))
        return loader

    return enter


def list_datasets() -> list[DatasetSpec]:
    """Return the catalogue in alphabetical order."""
    return [DATASETS[name][0] for name in DATASETS]


def dataset_spec(name: str) -> DatasetSpec:
    """Return the catalogue entry of ``cifar100``, ``folder:PATH``, ..."""
    return _resolve(name)[0]


def load_dataset(
    name: str,
    root: str | Path | None = None,
    *,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    validation: float = 0.0,
    validation_per_class: int | None = None,
    seed: int = 0,
    short_side: int | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    num_workers: int = 0,
) -> Dataset:
    """Load a dataset by name.

    Args:
        name: A catalogue name, or ``folder:PATH``, ``npz:PATH``, ``domains:PATH``, ``features:PATH``.
        root: Folder that holds the datasets; by default ``$CFLAT_DATA``. Not used by names with a path.
        train_per_class: Keep so many training images of each class, and of each class and domain.
        test_per_class: The same for test images.
        validation: Fraction of the training images of each class (and domain) to hold out; it is cut from all of
            them, before ``train_per_class`` chooses among the others.
        validation_per_class: Keep so many of those.
        seed: Seed of these choices.
        short_side: Shrink image files to this shorter side when they are decoded; ``None`` keeps their size.
        cache_bytes: Memory for decoded image files, train and test together.
        num_workers: Processes that decode image files ahead of their use; 0 decodes them when they are read.

    Raises:
        ConfigError: If the catalogue has no such name.
        DataError: If files are missing, broken or inconsistent; the message names them.
    """
    cache = DecodedCache(cache_bytes)
    dataset = read_dataset(name, root, short_side=short_side, cache=cache, num_workers=num_workers)
    # In this order: which images validate must not depend on how many are trained on.
    return dataset.hold_out(validation, seed).subsample(
        train_per_class, test_per_class, seed, validation_per_class=validation_per_class
    )


def locate_dataset(name: str, root: str | Path | None = None) -> Path | None:
    """Return where the files of a dataset are, without reading them; None if it needs none.

    Raises:
        ConfigError: If the catalogue has no such name.
        DataError: If they are not there.
    """
    source = source_of(name, root)
    return None if source.spec.is_embedded else source.find()


def read_dataset(name: str, root: str | Path | None, *, report: Report = refuse, **how: Any) -> Dataset:
    """Load all of a dataset, with every problem that can be passed over given to ``report``.

    ``how`` are further fields of `Source`.
    """
    spec, loader = _resolve(name)
    loaded = loader(source_of(name, root, report=report, **how))
    dataset = replace(loaded, name=name if spec.takes_path else spec.name, split=spec.split or loaded.split)
    # A class too few or too many would shift the labels of all that follow, and with them the class order.
    if spec.num_classes not in (None, dataset.num_classes):
        report(f"{spec.title} must have {spec.num_classes} classes, found {dataset.num_classes}: {spec.layout}.")
    validate_dataset(dataset, report)
    return dataset


def source_of(name: str, root: str | Path | None, **how: Any) -> Source:
    """Return where a dataset is looked for; ``how`` are further fields of `Source`."""
    spec, _ = _resolve(name)
    if spec.takes_path:
        return Source(spec, path=_user_path(name.partition(":")[2]), **how)
    given = os.environ.get(ROOT_VARIABLE) if root is None else root
    return Source(spec, root=_user_path(given) if given else None, **how)


def _user_path(text: str | Path) -> Path:
    """Return a path with ``~`` replaced."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"The path {str(text)!r} refers to the home directory of an unknown user.") from None


def _resolve(name: str) -> tuple[DatasetSpec, Loader]:
    kind, colon, path = name.partition(":")
    spec, loader = DATASETS[kind]
    if spec.takes_path and not path:
        raise ConfigError(f"Dataset {name!r} needs a path: write {spec.name}:PATH.")
    if colon and not spec.takes_path:
        raise ConfigError(f"Dataset {spec.name!r} takes no path, got {name!r}; give the data root instead.")
    return spec, loader
