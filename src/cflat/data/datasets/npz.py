"""``npz:PATH`` and ``features:PATH``: arrays in one NumPy file, images or the features of images."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cflat._errors import DataError, shortened
from cflat._files import open_regular
from cflat._machine import free_memory, gib
from cflat.data.catalog import DatasetSpec, Source, register_dataset
from cflat.data.dataset import Dataset, count_labels
from cflat.data.images import ImageSet
from cflat.data.pixels import ArrayPixels, ArrayVectors, PixelStore

Arrays: TypeAlias = dict[str, npt.NDArray[np.generic]]

REQUIRED = ("x_train", "y_train", "x_test", "y_test")
LARGEST_LABEL = 2**63 - 1
BOMB_BYTES, BOMB_RATIO = 1 << 28, 200
"""An array that is larger than this, and that many times larger than what is packed, is no set of images."""
OPTIONAL = ("class_names", "domain_train", "domain_test", "domain_names", "split")


@register_dataset(
    DatasetSpec(
        name="npz",
        title="NumPy arrays",
        layout=(
            "an .npz file with x_train, x_test (uint8, images x height x width x 3), y_train, y_test (labels"
            " from 0), optional class_names, domain_train, domain_test, domain_names"
        ),
        licence="yours",
        takes_path=True,
    )
)
def load_npz(source: Source) -> Dataset:
    """Load the arrays; nothing in the file is unpickled."""
    return _load(source.find(), ArrayPixels)


@register_dataset(
    DatasetSpec(
        name="features",
        title="Features of images",
        layout=(
            "an .npz file made by cflat features: x_train, x_test (floats, images x features), y_train, y_test"
            " (labels from 0), optional class_names, domain_train, domain_test, domain_names, split"
        ),
        licence="that of the images",
        takes_path=True,
        holds_vectors=True,
        preset="vectors",
    )
)
def load_features(source: Source) -> Dataset:
    """Load vectors in the place of images."""
    return _load(source.find(), ArrayVectors)


def _load(path: Path, make_store: Callable[[Any, str], PixelStore]) -> Dataset:
    arrays = read_arrays(path, REQUIRED, OPTIONAL)
    if ("domain_train" in arrays) != ("domain_test" in arrays):
        raise DataError(f"{str(path)!r} has only one of domain_train and domain_test; give both or neither.")
    sets = []
    for part in ("train", "test"):
        store = make_store(arrays[f"x_{part}"], f"x_{part} of {path.name}")
        labels = _integers(arrays, f"y_{part}", len(store), path)
        key = f"domain_{part}"
        domains = _integers(arrays, key, len(store), path) if key in arrays else None
        sets.append(ImageSet(store, labels, domains=domains))
    train, test = sets
    class_names = _names(arrays, "class_names", train.labels, path)
    domain_names = None if train.domains is None else _names(arrays, "domain_names", train.domains, path)
    split = _split(arrays["split"], len(class_names), path) if "split" in arrays else None
    return Dataset(path.stem, train, test, class_names, domain_names, split)


def read_arrays(path: Path, required: Sequence[str], optional: Sequence[str] = ()) -> Arrays:
    """Read arrays of an ``.npz`` file; raise a `DataError` for what cannot be read, or should not be."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            missing = [name for name in required if name not in members]
            if missing:
                found = ", ".join(sorted(members)) or "nothing"
                raise DataError(f"{str(path)!r} lacks {', '.join(missing)}; it holds {shortened(found, 300)}.")
            wanted = {name: members[name] for name in (*required, *optional) if name in members}
            _require_modest(path, list(wanted.values()))
            return {name: _read_member(archive, member, path) for name, member in wanted.items()}
    except DataError:
        raise
    except Exception as error:  # a foreign file can be broken in more ways than can be listed
        reason = getattr(error, "strerror", None) or "write it again with np.savez"
        raise DataError(f"Cannot read {str(path)!r} as an .npz file; {reason}.") from error


def _require_modest(path: Path, members: Sequence[zipfile.ZipInfo]) -> None:
    """Reject arrays that do not fit into memory, or that are next to nothing in the file: before one is unpacked."""
    for member in members:
        if member.file_size > max(BOMB_BYTES, BOMB_RATIO * member.compress_size):
            raise DataError(
                f"{member.filename!r} of {str(path)!r} would grow from {member.compress_size} bytes to"
                f" {gib(member.file_size)}; no images are packed like that. Write it again with np.savez."
            )
    # Twice: an array and its copy with channels first are in memory at the same time.
    needed, free = 2 * sum(member.file_size for member in members), free_memory()
    if free is not None and needed > free:
        raise DataError(
            f"The arrays of {str(path)!r} need {gib(needed)} of memory, {gib(free)} are free; use image files instead."
        )


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> npt.NDArray[np.generic]:
    """Read one array, if its header promises no more than the file holds and no Python objects."""
    name = member.filename.removesuffix(".npy")
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
    if dtype.hasobject:
        raise DataError(
            f"Array {name!r} of {str(path)!r} holds Python objects, which are never unpickled;"
            " save it as a plain array, for example names.astype(str)."
        )
    # NumPy allocates what a header promises before it reads anything.
    if math.prod(shape) * dtype.itemsize > member.file_size:
        raise DataError(
            f"The header of {name!r} in {str(path)!r} promises {dtype} of shape {shape}, the file holds"
            f" {member.file_size} bytes; write it again with np.savez."
        )
    with archive.open(member) as file:
        # Opened again: read_array begins at the header.
        array: npt.NDArray[np.generic] = np.lib.format.read_array(file, allow_pickle=False)
    return array


def _integers(arrays: Arrays, name: str, count: int, path: Path) -> npt.NDArray[np.generic]:
    array = arrays[name]
    if array.shape != (count,) or not np.issubdtype(array.dtype, np.integer):
        raise DataError(
            f"{name} of {str(path)!r} must be {count} whole numbers, one per image;"
            f" got {array.dtype} of shape {array.shape}."
        )
    # astype would wrap a large uint64 around to a negative label.
    if array.size and int(array.max()) > LARGEST_LABEL:
        raise DataError(
            f"{name} of {str(path)!r} holds {int(array.max())}, which is too large for a label or a domain."
        )
    return array.astype(np.int64)


def _split(array: npt.NDArray[np.generic], num_classes: int, path: Path) -> tuple[int, int]:
    """Return the usual (initial, increment) of a stream."""
    if array.shape == (2,) and np.issubdtype(array.dtype, np.integer):
        initial, increment = array.tolist()
        if 0 <= initial <= num_classes and increment >= 1:
            return initial, increment
    raise DataError(
        f"split of {str(path)!r} must be two whole numbers: the classes of the first task, 0 (as many as in the others)"
        f" to {num_classes}, and of each later one, at least 1; got {shortened(str(array.tolist()), 100)}."
    )


def _names(arrays: Arrays, name: str, numbers: npt.NDArray[np.int64], path: Path) -> tuple[str, ...]:
    """Return the stored names, or the numbers themselves up to the largest in the train split."""
    if name not in arrays:
        return tuple(map(str, range(count_labels(numbers, str(path)))))
    names = arrays[name]
    if names.ndim != 1 or names.dtype.kind not in "US":
        raise DataError(f"{name} of {str(path)!r} must be a list of text, got {names.dtype} of shape {names.shape}.")
    try:
        return tuple(map(str, names.astype(str)))
    except UnicodeError:
        raise DataError(f"{name} of {str(path)!r} must be ASCII or Unicode text; save names.astype(str).") from None
