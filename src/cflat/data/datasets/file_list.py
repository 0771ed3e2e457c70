"""``domains:PATH``: lists ``<domain>_train.txt`` and ``<domain>_test.txt`` with lines ``path label``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from cflat._errors import DataError
from cflat._files import read_text
from cflat.data.catalog import DatasetSpec, Source, register_dataset
from cflat.data.dataset import Dataset, Report, count_labels
from cflat.data.images import ImageSet

TRAIN_LIST = "_train.txt"
MAX_DIGITS = 9
"""Of a label."""


class Entry(NamedTuple):
    """One line of a list."""

    path: str
    label: int


class DomainLists(NamedTuple):
    """The images of one domain."""

    name: str
    train: list[Entry]
    test: list[Entry]


@register_dataset(
    DatasetSpec(
        name="domains",
        title="Domain file lists",
        layout="<domain>_train.txt and <domain>_test.txt with lines 'path label', paths below the folder",
        licence="yours",
        takes_path=True,
    )
)
def load_domains(source: Source) -> Dataset:
    """Load every domain that has a train list, in alphabetical order."""
    root = source.find()
    names = sorted(path.name[: -len(TRAIN_LIST)] for path in root.glob(f"?*{TRAIN_LIST}"))
    if not names:
        raise DataError(f"{str(root)!r} has no list *{TRAIN_LIST}. Expected {source.spec.layout}.")
    return build_domain_dataset(source, root, read_domain_lists(root, names, source.report))


def read_domain_lists(root: Path, domains: Sequence[str], report: Report) -> list[DomainLists]:
    """Read the train and the test list of each domain."""
    return [
        DomainLists(name, *(_read_list(root / f"{name}_{split}.txt", report) for split in ("train", "test")))
        for name in domains
    ]


def build_domain_dataset(source: Source, root: Path, domains: Sequence[DomainLists]) -> Dataset:
    """Pool the domains into one train and one test split; class names are the folders of the images."""
    labels = [entry.label for domain in domains for entry in domain.train]
    count = source.spec.num_classes or count_labels(labels, str(root))
    folders: dict[int, set[str]] = {}
    for entry in (entry for domain in domains for entry in (*domain.train, *domain.test)):
        folders.setdefault(entry.label, set()).add(PurePosixPath(entry.path).parent.name)
    class_names = (folders.get(label, set()) for label in range(count))

    def pool(lists: Sequence[Sequence[Entry]]) -> ImageSet:
        # Of no entries, zip makes nothing that could be taken apart.
        paths, labels = zip(*(entry for part in lists for entry in part), strict=True) if any(lists) else ((), ())
        return source.images(root, paths, labels, [domain for domain, part in enumerate(lists) for _ in part])

    return Dataset(
        root.name,
        pool([domain.train for domain in domains]),
        pool([domain.test for domain in domains]),
        tuple(names.pop() if len(names) == 1 else str(label) for label, names in enumerate(class_names)),
        tuple(domain.name for domain in domains),
    )


def _read_list(path: Path, report: Report) -> list[Entry]:
    try:
        lines = read_text(path).splitlines()
    except FileNotFoundError:
        raise DataError(f"File list {str(path)!r} does not exist; each domain needs two.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read file list {str(path)!r} as UTF-8 text.") from error
    entries = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        # From the right: paths may contain blanks.
        image, _, label = line.strip().rpartition(" ")
        # isdigit() would let superscripts pass, and int() raises an error of its own for these and above 4300 digits.
        if not image or not label.isdecimal() or len(label) > MAX_DIGITS:
            report(f"{path}, line {number}: expected 'path label' with a label from 0, got {line!r:.200}.")
        elif _leaves_root(image):
            report(f"{path}, line {number}: path {image!r} leaves the data root; use paths below it.")
        else:
            entries.append(Entry(image.strip(), int(label)))
    return entries


def _leaves_root(path: str) -> bool:
    # On Windows backslashes separate and drive letters leave the root; lists are checked alike on every system.
    parts = PurePosixPath(path.replace("\\", "/"))
    return parts.is_absolute() or ".." in parts.parts or not parts.parts or ":" in parts.parts[0]
