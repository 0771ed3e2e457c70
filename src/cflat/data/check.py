"""`check_dataset`: everything that is wrong with a dataset on disk, in one report."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cflat._errors import DataError
from cflat.data.catalog import DatasetSpec, dataset_spec, read_dataset
from cflat.data.dataset import Dataset
from cflat.data.images import ImageSet
from cflat.data.pixels import DecodedCache, FilePixels
from cflat.data.stream import Stream

HEADER_THREADS = 8
"""Reading headers mostly waits for the disk."""
MAX_EXAMPLES = 10
"""Problems of one kind to list; the others are counted."""


@dataclass(frozen=True)
class Finding:
    """One thing to fix, or at least to know."""

    severity: Literal["error", "warning"]
    """Errors stop or falsify a run; warnings are deviations from the dataset as published."""
    message: str


@dataclass(frozen=True)
class SplitCounts:
    """How many images a split has, and how evenly they are spread."""

    images: int
    fewest_per_class: int
    most_per_class: int
    readable: int | None
    """Images that decode; ``None`` if they were not read."""


@dataclass(frozen=True)
class DataReport:
    """What `check_dataset` found."""

    name: str
    title: str
    licence: str
    num_classes: int | None
    domains: tuple[str, ...]
    train: SplitCounts | None
    test: SplitCounts | None
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether a run can rely on the data."""
        return all(finding.severity != "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def render(self) -> str:
        """Return the report as plain text."""
        lines = [f"{self.title} ({self.name}): {'ok' if self.ok else 'not usable as it is'}"]
        if self.num_classes is not None:
            lines.append(f"  classes  {self.num_classes}")
        if self.domains:
            lines.append(f"  domains  {', '.join(self.domains)}")
        for split, counts in (("train", self.train), ("test", self.test)):
            if counts is not None:
                spread = f"{counts.fewest_per_class} to {counts.most_per_class} per class"
                read = "not read" if counts.readable is None else f"{counts.readable} readable"
                lines.append(f"  {split:<8} {counts.images} images, {spread}, {read}")
        lines.append(f"  licence  {self.licence}")
        lines += [f"  {finding.severity}: {finding.message}" for finding in self.findings]
        return "\n".join(lines)


def require_readable(stream: Stream, name: str, root: str | Path | None = None) -> None:
    """Read the headers of all image files of a stream, to find broken ones before training.

    A header costs a small part of decoding an image; truncated pixels are not found here. A `DataError` names the
    first file that cannot be read, and the command, with ``name`` and ``root``, that lists them all.
    """
    sets = [images for task in stream.tasks for images in (task.train, task.test, task.validation)]
    rows = [(images.store, row) for images in sets if images is not None for row in images.rows.tolist()]
    files = [(store, row) for store, row in rows if isinstance(store, FilePixels)]
    with ThreadPoolExecutor(HEADER_THREADS) as pool:
        found = pool.map(lambda file: file[0].header_problem(file[1]), files)
        problems = [problem for problem in found if problem is not None]
    if problems:
        words = ["cflat", "check-data", name, *(["--root", str(root)] if root is not None else [])]
        count = f"{len(problems)} of {len(files)} image files cannot be read. " if len(problems) > 1 else ""
        raise DataError(f"{count}{problems[0]} Replace or remove it; to see everything: {shlex.join(words)}")


def check_dataset(name: str, root: str | Path | None = None, *, read_images: bool = True) -> DataReport:
    """Check counts, layout, labels, unreadable images and duplicates across train and test.

    Args:
        name: A name as for `load_dataset`.
        root: Data root; by default ``$CFLAT_DATA``.
        read_images: Decode every image and compare contents; the only slow part.
    """
    spec = dataset_spec(name)
    problems: list[str] = []
    try:
        # Without a cache: every image is read once.
        dataset = read_dataset(name, root, report=problems.append, cache=DecodedCache(0))
    except DataError as error:
        problems.append(str(error))
        findings = tuple(Finding("error", problem) for problem in problems)
        return DataReport(name, spec.title, spec.licence, None, (), None, None, findings)
    warned = list(_deviations(dataset, spec))
    num_broken: dict[str, int | None] = {"train": None, "test": None}
    if read_images:
        hashes: dict[str, dict[bytes, int]] = {}
        blank: list[str] = []
        for split in num_broken:
            broken: list[str] = []
            hashes[split] = _content_hashes(getattr(dataset, split), broken, blank)
            num_broken[split] = len(broken)
            problems += _examples(broken)
        warned += [*_duplicates(dataset, hashes), *_examples(blank)]
    findings = tuple(Finding("error", text) for text in problems) + tuple(Finding("warning", text) for text in warned)
    train, test = (_counts(dataset, getattr(dataset, split), count) for split, count in num_broken.items())
    domains = dataset.domain_names or ()
    return DataReport(name, spec.title, spec.licence, dataset.num_classes, domains, train, test, findings)


def _counts(dataset: Dataset, images: ImageSet, num_broken: int | None) -> SplitCounts:
    # Labels out of range are findings of their own; here they would break the count.
    known = images.labels[(images.labels >= 0) & (images.labels < dataset.num_classes)]
    per_class = np.bincount(known, minlength=max(1, dataset.num_classes))
    readable = None if num_broken is None else len(images) - num_broken
    return SplitCounts(len(images), int(per_class.min()), int(per_class.max()), readable)


def _deviations(dataset: Dataset, spec: DatasetSpec) -> Iterator[str]:
    for split, expected in (("train", spec.num_train), ("test", spec.num_test)):
        found = len(getattr(dataset, split))
        if expected is not None and found != expected:
            yield (
                f"The {split} split has {found} images, the published one {expected}; complete it before you"
                " compare with published results."
            )
    untested = sorted(set(range(dataset.num_classes)) - set(dataset.test.labels.tolist()))
    if untested:
        names = ", ".join(repr(dataset.class_names[label]) for label in untested[:MAX_EXAMPLES])
        yield f"{len(untested)} classes have no test images ({names}); add some to measure them."


def _content_hashes(images: ImageSet, broken: list[str], blank: list[str]) -> dict[bytes, int]:
    """Return one row for each distinct content, and note the images that cannot be decoded or show nothing."""
    hashes: dict[bytes, int] = {}
    for index, row in enumerate(images.rows.tolist()):
        try:
            content = images.store.content(row)
            pixels = images.pixels([index])[0]
        except DataError as error:
            broken.append(f"{str(error).rstrip('.')}; replace or remove the file.")
            continue
        # More than three numbers: a single RGB pixel may well be grey.
        if pixels.numel() > 3 and pixels.min() == pixels.max():
            blank.append(f"{images.store.describe(row)} has one value in all its pixels; look at how it was saved.")
        hashes.setdefault(hashlib.blake2b(content, digest_size=16).digest(), row)
    return hashes


def _duplicates(dataset: Dataset, hashes: dict[str, dict[bytes, int]]) -> Iterator[str]:
    train, test = hashes["train"], hashes["test"]
    yield from _examples(
        f"Test image {dataset.test.store.describe(test_row)} has the same content as train image"
        f" {dataset.train.store.describe(row)}; remove one of them."
        # Sorted: the intersection is a set, and the report must not change from run to run.
        for row, test_row in sorted((train[key], test[key]) for key in train.keys() & test.keys())
    )


def _examples(problems: Iterable[str]) -> Iterator[str]:
    listed = list(problems)
    yield from listed[:MAX_EXAMPLES]
    if len(listed) > MAX_EXAMPLES:
        yield f"... and {len(listed) - MAX_EXAMPLES} more like the last one."
