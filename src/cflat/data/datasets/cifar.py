"""CIFAR-10 and CIFAR-100: torchvision's files, or the same arrays as ``cifar10.npz`` and ``cifar100.npz``."""

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


def load_cifar(source: Source) -> Dataset:
    """Load whichever form is there; the npz form may hold a part of the images."""
    place = source.find()
    if place.suffix == ".npz":
        return load_npz(replace(source, path=place))
    # The parent: torchvision adds the name of its folder.
    train, names = _read_split(source, place.parent, train=True)
    test, _ = _read_split(source, place.parent, train=False)
    return Dataset(source.spec.name, train, test, names)


def _read_split(source: Source, root: Path, *, train: bool) -> tuple[ImageSet, tuple[str, ...]]:
    from torchvision import datasets

    reader, title = getattr(datasets, source.spec.name.upper()), source.spec.title  # CIFAR10 or CIFAR100
    try:
        raw = reader(str(root), train=train, download=False)  # compares checksums before it unpickles
    except (RuntimeError, OSError) as error:
        place = str(root / reader.base_folder)
        raise DataError(f"{title} in {place!r} is incomplete or altered; download it again.") from error
    store = ArrayPixels(np.asarray(raw.data), f"{title} {'train' if train else 'test'}")
    return ImageSet(store, raw.targets), tuple(raw.classes)


for _count, _step, _folder in ((10, 2, "cifar-10-batches-py"), (100, 10, "cifar-100-python")):
    _name = f"cifar{_count}"
    register_dataset(
        DatasetSpec(
            name=_name,
            title=f"CIFAR-{_count}",
            layout=f"{_name}.npz, or the folder {_folder}/ as torchvision downloads it",
            licence="none stated by its authors; cite Krizhevsky, 2009",
            num_classes=_count,
            num_train=50_000,
            num_test=10_000,
            split=(_step, _step),
            places=(f"{_name}.npz", _folder, f"{_name}/{_name}.npz", f"{_name}/{_folder}"),
        )
    )(load_cifar)
