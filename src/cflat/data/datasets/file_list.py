"""``domains:PATH``: lists ``<domain>_train.txt`` and ``<domain>_test.txt`` with lines ``path label``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class DomainLists:
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
    everything = [entry for domain in domains for entry in (*domain.train, *domain.test)]
    count = source.spec.num_classes or count_labels(
        [entry.label for domain in domains for entry in domain.train], str(root)
    )
    folders: dict[int, set[str]] = {}
    for entry in everything:
        folders.setdefault(entry.label, set()).add(PurePosixPath(entry.path).parent.name)
    class_names = (folders.get(label, set()) for label in range(count))
    return Dataset(
        root.name,
        _pool(source, root, [domain.train for domain in domains]),
        _pool(source, root, [domain.test for domain in domains]),
        tuple(names.pop() if len(names) == 1 else str(label) for label, names in enumerate(class_names)),
        tuple(domain.name for domain in domains),
    )


def _pool(source: Source, root: Path, lists: Sequence[Sequence[Entry]]) -> ImageSet:
    entries = [entry for part in lists for entry in part]
    domains = [domain for domain, part in enumerate(lists) for _ in part]
    return source.images(root, [entry.path for entry in entries], [entry.label for entry in entries], domains)


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
        image, _, label = line.strip().rpartition(" ")
        if not image or not label.isdecimal() or len(label) > MAX_DIGITS:
            report(f"{path}, line {number}: expected 'path label' with a label from 0, got {line!r:.200}.")
        elif _leaves_root(image):
            report(f"{path}, line {number}: path {image!r} leaves the data root; use paths below it.")
        else:
            entries.append(Entry(image.strip(), int(label)))
    return entries


def _leaves_root(path: str) -> bool:
    parts = PurePosixPath(path.replace("\\", "/"))
    return parts.is_absolute() or ".." in parts.parts or not parts.parts or ":" in parts.parts[0]
