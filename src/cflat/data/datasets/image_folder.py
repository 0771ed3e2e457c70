"""``folder:PATH``, a folder per class under train/ and test/, and the datasets that come in this layout."""

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


_RESEARCH = "images belong to their authors; research use"

# Folder and what else it is called, title, images for training and test, classes per task, class folders, licence.
for _name, _other, _title, _counts, _step, _each, _kinds, _licence in (
    # in the folders that the field's toolboxes distribute, not the official split
    ("cub200", "cub", "CUB-200", (9_430, 2_358), 10, "<class>", "bird species",
     "images for non-commercial research and education only"),
    # photographs that networks get wrong, in the split of the field's toolboxes
    ("imagenet_a", "imagenet-a", "ImageNet-A", (5_981, 1_519), 20, "<wnid>", "classes", _RESEARCH),
    # renditions of ImageNet classes, in the 80/20 split that was made for L2P
    ("imagenet_r", "imagenet-r", "ImageNet-R", (24_000, 6_000), 20, "<wnid>", "classes", _RESEARCH),
    # the subset that the field's class-incremental benchmarks use
    ("objectnet", "objnet", "ObjectNet", (26_509, 6_628), 10, "<class>", "classes",
     "CC BY 4.0; its authors also ask that no model be tuned on it, which this benchmark does"),
):  # fmt: skip
    register_dataset(
        DatasetSpec(
            name=_name,
            title=_title,
            layout=f"{_name}/ (or {_other}/) with train/{_each}/ and test/{_each}/ folders of 200 {_kinds}",
            licence=_licence,
            num_classes=200,
            num_train=_counts[0],
            num_test=_counts[1],
            split=(_step, _step),
            places=(_name, _other),
        )
    )(load_class_folders)
