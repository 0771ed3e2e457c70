"""Datasets that torchvision can download; nothing is fetched unless it is asked for (``--download``)."""

from __future__ import annotations

import socket
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from http.client import HTTPException
from pathlib import Path

from cflat._errors import DataError
from cflat.data.catalog import dataset_spec, source_of

READERS = {"cifar10": "CIFAR10", "cifar100": "CIFAR100"}
"""By our name: the class of torchvision that downloads the dataset in the layout that we read."""
PATIENCE = 30.0
"""Seconds without an answer; torchvision itself would wait forever."""


def download_dataset(name: str, root: str | Path | None = None) -> Path | None:
    """Download a dataset and unpack it, unless it is there; return its file or folder, None if it needs none.

    torchvision compares checksums: what an interrupted download has left behind is fetched again.

    Args:
        name: A name as for `load_dataset`.
        root: Data root, made if it does not exist; by default ``$CFLAT_DATA``.

    Raises:
        ConfigError: If the catalogue has no such name.
        DataError: If it is not there and cannot be downloaded; the message says why.
    """
    source = source_of(name, root)
    spec = source.spec
    if spec.is_embedded:
        return None
    try:
        place = source.find()
    except DataError as missing:
        if spec.name not in READERS:
            titles = " and ".join(dataset_spec(known).title for known in READERS)
            raise DataError(f"{missing} Only {titles} can be downloaded.") from None
        if source.root is None:
            raise
        return _download(spec.name, source.root)
    # A folder may be what an interrupted download has left; an .npz file is the user's own and stays as it is.
    return _download(spec.name, place.parent) if spec.name in READERS and place.is_dir() else place


def _download(name: str, folder: Path) -> Path:
    """Let torchvision fetch what is missing or altered in ``folder``; return where the files are."""
    from torchvision import datasets

    reader, spec = getattr(datasets, READERS[name]), dataset_spec(name)
    try:
        with _impatient(), redirect_stdout(sys.stderr):  # stdout is for the result of a command
            folder.mkdir(parents=True, exist_ok=True)
            reader(str(folder), download=True)
    # torchvision raises RuntimeError for a wrong checksum; a broken connection or archive raises one of the others.
    except (OSError, RuntimeError, HTTPException, tarfile.TarError, EOFError) as error:
        reason = str(error).removeprefix("<urlopen error ").rstrip(">.") or type(error).__name__
        raise DataError(
            f"{spec.title} cannot be downloaded from {reader.url} to {str(folder)!r} ({reason}); "
            f"fetch it elsewhere and put there {spec.layout}."
        ) from error
    return folder / str(reader.base_folder)


@contextmanager
def _impatient() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
