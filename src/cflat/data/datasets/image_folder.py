"""``folder:PATH``: a folder per class under train/ and test/; other datasets share this layout."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from cflat._errors import DataError
from cflat.data.catalog import DatasetSpec, Source, register_dataset
from cflat.data.dataset import Dataset, Report
from cflat.data.images import ImageSet

__all__ = ["SUFFIXES", "class_folders", "image_files", "index_split", "load_class_folders"]

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
    paths: list[str] = []
    labels: list[int] = []
    for name, label in label_of.items():
        found = image_files(root / split / name, source.report)
        paths += [path.relative_to(root).as_posix() for path in found]
        labels += [label] * (len(paths) - len(labels))
    return source.images(root, paths, labels)


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
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        report(f"Cannot read folder {str(folder)!r}: {error.strerror}; check its permissions.")
        return []
