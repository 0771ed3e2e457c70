"""Tiny-ImageNet: 200 ImageNet classes at 64 x 64 pixels, as its authors distribute it; the val images are the test."""

from __future__ import annotations

from pathlib import Path

from cflat._errors import DataError
from cflat._files import read_text
from cflat.data.catalog import DatasetSpec, Source, register_dataset
from cflat.data.dataset import Dataset
from cflat.data.datasets.image_folder import class_folders, index_split
from cflat.data.images import ImageSet

ANNOTATIONS = "val_annotations.txt"


@register_dataset(
    DatasetSpec(
        name="tiny_imagenet",
        title="Tiny-ImageNet",
        layout="tiny-imagenet-200/ (or tiny_imagenet/) with train/<wnid>/ folders of 200 classes and val/, as it comes"
        " with val_annotations.txt or sorted into <wnid>/ folders",
        licence="images belong to their authors; non-commercial research only",
        num_classes=200,
        num_train=100_000,
        num_test=10_000,
        split=(20, 20),
        places=("tiny-imagenet-200", "tiny_imagenet", "tiny-imagenet"),
    )
)
def load_tiny_imagenet(source: Source) -> Dataset:
    """Index both splits; labels follow the alphabetical order of the wnids."""
    root = source.find()
    for split in ("train", "val"):
        if not (root / split).is_dir():
            raise DataError(f"{str(root)!r} has no folder {split!r}. Expected {source.spec.layout}.")
    wnids = class_folders(root / "train", source.report)
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    train = index_split(source, root, "train", label_of)
    annotations = root / "val" / ANNOTATIONS
    if annotations.is_file():
        test = _annotated(source, root, annotations, label_of)
    else:
        tested = class_folders(root / "val", source.report)
        test = index_split(source, root, "val", {wnid: label_of[wnid] for wnid in tested if wnid in label_of})
    return Dataset(root.name, train, test, _names(root / "words.txt", wnids))


def _annotated(source: Source, root: Path, file: Path, label_of: dict[str, int]) -> ImageSet:
    """Read lines of file name and wnid, separated by tabs; the bounding box that follows is ignored."""
    paths, labels = [], []
    for number, line in enumerate(_lines(file), start=1):
        name, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        # A name with a folder in it could lead out of val/images.
        if wnid not in label_of or Path(name).name != name:
            source.report(f"{file}, line {number}: expected a file name, a tab and a known wnid, got {line!r:.80}.")
            continue
        paths.append(f"val/images/{name}")
        labels.append(label_of[wnid])
    return source.images(root, paths, labels)


def _names(words: Path, wnids: list[str]) -> tuple[str, ...]:
    """Return what the classes are called: the first word for each; the wnids if a word is missing or doubled."""
    lines = _lines(words) if words.is_file() else []
    word_of = {wnid: rest.split(",")[0] for wnid, _, rest in (line.partition("\t") for line in lines)}
    names = tuple(word_of.get(wnid, "") for wnid in wnids)
    return names if all(names) and len(set(names)) == len(names) else tuple(wnids)


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in read_text(file).splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read {str(file)!r} as UTF-8 text.") from error
