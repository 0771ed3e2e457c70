"""``folder:PATH``, a folder per class under train/ and test/, and the datasets that come in this layout."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from cflat._errors import DataError
from cflat.data.catalog import DatasetSpec, Source, register_dataset
from cflat.data.dataset import Dataset, Report
from cflat.data.images import ImageSet

SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"))


@register_dataset(
    DatasetSpec(
        name="folder",
        title="Image folder",
        layout="train/<class>/ and test/<class>/ folders with images",
        licence="yours",
        takes_path=True,
    )
)
def load_class_folders(source: Source) -> Dataset:
    """Index train/<class>/ and test/<class>/; labels follow the alphabetical order of the train folders."""
    root = source.find()
    for split in ("train", "test"):
        if not (root / split).is_dir():
            raise DataError(f"{str(root)!r} has no folder {split!r}. Expected {source.spec.layout}.")
    class_names, tested = (class_folders(root / split, source.report) for split in ("train", "test"))
    for name in sorted(set(tested) - set(class_names)):
        source.report(
            f"Class {name!r} is in the test split but not in the train split of {str(root)!r};"
            " add training images or remove it."
        )
    label_of = {name: label for label, name in enumerate(class_names)}
    train = index_split(source, root, "train", label_of)
    test = index_split(source, root, "test", {name: label_of[name] for name in tested if name in label_of})
    return Dataset(root.name, train, test, tuple(class_names))


def index_split(source: Source, root: Path, split: str, label_of: Mapping[str, int]) -> ImageSet:
    """Return the images of the class folders below ``root/split``."""
    found = {name: list(image_files(root / split / name, source.report)) for name in label_of}
    paths = [path.relative_to(root).as_posix() for files in found.values() for path in files]
    return source.images(root, paths, [label_of[name] for name, files in found.items() for _ in files])


def class_folders(folder: Path, report: Report) -> list[str]:
    """Return the names of the class folders; one may be a link, but not to a folder that contains it."""
    names = []
    for entry in _entries(folder, report):
        if entry.name.startswith("."):
            continue
        path = Path(entry.path)
        try:
            target = path.resolve(strict=True)
        except (OSError, RuntimeError):  # Python 3.12 and before raise RuntimeError for a loop
            report(f"{entry.path!r} is a broken link or a loop of links; remove it.")
            continue
        if not target.is_dir():
            continue
        if entry.is_symlink() and folder.resolve().is_relative_to(target):
            report(f"{entry.path!r} is a link to a folder that contains it; remove it.")
            continue
        names.append(entry.name)
    return names


def image_files(folder: Path, report: Report) -> Iterator[Path]:
    """Yield the images below a folder in alphabetical order; links to folders are not entered."""
    for entry in _entries(folder, report):
        # A link may lead back up, and the walk would not end.
        if entry.is_dir(follow_symlinks=False):
            yield from image_files(Path(entry.path), report)
        elif Path(entry.name).suffix.lower() in SUFFIXES:
            if Path(entry.path).is_file():
                yield Path(entry.path)
            else:
                report(f"{entry.path!r} is not a file but a broken link, a pipe or the like; remove it.")


def _entries(folder: Path, report: Report) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            # The order of scandir is the file system's; labels and row numbers follow this one on every machine.
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        report(f"Cannot read folder {str(folder)!r}: {error.strerror}; check its permissions.")
        return []


for _spec in (
    DatasetSpec(  # in the folders that the field's toolboxes distribute, not the official split
        name="cub200",
        title="CUB-200",
        layout="cub200/ (or cub/) with train/<class>/ and test/<class>/ folders of 200 bird species",
        licence="images for non-commercial research and education only",
        num_classes=200,
        num_train=9_430,
        num_test=2_358,
        split=(10, 10),
        places=("cub200", "cub"),
    ),
    DatasetSpec(  # photographs that networks get wrong, in the split of the field's toolboxes
        name="imagenet_a",
        title="ImageNet-A",
        layout="imagenet_a/ (or imagenet-a/) with train/<wnid>/ and test/<wnid>/ folders of 200 classes",
        licence="images belong to their authors; research use",
        num_classes=200,
        num_train=5_981,
        num_test=1_519,
        split=(20, 20),
        places=("imagenet_a", "imagenet-a"),
    ),
    DatasetSpec(  # renditions of ImageNet classes, in the 80/20 split that was made for L2P
        name="imagenet_r",
        title="ImageNet-R",
        layout="imagenet_r/ (or imagenet-r/) with train/<wnid>/ and test/<wnid>/ folders of 200 classes",
        licence="images belong to their authors; research use",
        num_classes=200,
        num_train=24_000,
        num_test=6_000,
        split=(20, 20),
        places=("imagenet_r", "imagenet-r"),
    ),
    DatasetSpec(  # the subset that the field's class-incremental benchmarks use
        name="objectnet",
        title="ObjectNet",
        layout="objectnet/ (or objnet/) with train/<class>/ and test/<class>/ folders of 200 classes",
        licence="CC BY 4.0; its authors also ask that no model be tuned on it, which this benchmark does",
        num_classes=200,
        num_train=26_509,
        num_test=6_628,
        split=(10, 10),
        places=("objectnet", "objnet"),
    ),
):
    register_dataset(_spec)(load_class_folders)
