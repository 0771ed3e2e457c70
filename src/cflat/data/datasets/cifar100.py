"""CIFAR-100: torchvision's files, or the same arrays as ``cifar100.npz``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from cflat._errors import DataError
from cflat.data.catalog import DatasetSpec, Source, register_dataset
from cflat.data.dataset import Dataset
from cflat.data.datasets.npz import load_npz
from cflat.data.images import ImageSet
from cflat.data.pixels import ArrayPixels

__all__ = ["load_cifar", "load_cifar100"]


@register_dataset(
    DatasetSpec(
        name="cifar100",
        title="CIFAR-100",
        layout="cifar100.npz, or the folder cifar-100-python/ as torchvision downloads it",
        licence="none stated by its authors; cite Krizhevsky, 2009",
        num_classes=100,
        num_train=50_000,
        num_test=10_000,
        split=(10, 10),
        places=("cifar100.npz", "cifar-100-python", "cifar100/cifar100.npz", "cifar100/cifar-100-python"),
    )
)
def load_cifar100(source: Source) -> Dataset:
    """Load whichever form is there; the npz form may hold a part of the images."""
    return load_cifar(source, "CIFAR100")


def load_cifar(source: Source, kind: str) -> Dataset:
    """Load an npz file, or the files that torchvision's class of this name reads."""
    place = source.find()
    if place.suffix == ".npz":
        return load_npz(replace(source, path=place))
    train, names = _read_split(source, kind, place.parent, train=True)
    test, _ = _read_split(source, kind, place.parent, train=False)
    return Dataset(source.spec.name, train, test, names)


def _read_split(source: Source, kind: str, root: Path, *, train: bool) -> tuple[ImageSet, tuple[str, ...]]:
    from torchvision import datasets

    reader, title = getattr(datasets, kind), source.spec.title
    try:
        raw = reader(str(root), train=train, download=False)  # compares checksums before it unpickles
    except (RuntimeError, OSError) as error:
        place = str(root / reader.base_folder)
        raise DataError(f"{title} in {place!r} is incomplete or altered; download it again.") from error
    store = ArrayPixels(np.asarray(raw.data), f"{title} {'train' if train else 'test'}")
    return ImageSet(store, raw.targets), tuple(raw.classes)
