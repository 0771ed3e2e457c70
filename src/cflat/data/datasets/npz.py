"""``npz:PATH`` and ``features:PATH``: arrays in one NumPy file, images or the features of images."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cflat._errors import DataError
from cflat.data.catalog import DatasetSpec, Source, register_dataset
from cflat.data.dataset import Dataset, count_labels
from cflat.data.images import ImageSet
from cflat.data.pixels import ArrayPixels, PixelStore
from cflat.data.vectors import ArrayVectors

__all__ = ["load_features", "load_npz"]

Arrays: TypeAlias = dict[str, npt.NDArray[np.generic]]

REQUIRED = ("x_train", "y_train", "x_test", "y_test")
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
    return _load(source.find(), ArrayPixels)  # type: ignore[arg-type]


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


def _load(path: Path, store: Callable[[npt.NDArray[np.generic], str], PixelStore]) -> Dataset:
    arrays = _read_arrays(path)
    class_names = _names(arrays, "class_names", arrays["y_train"], path)
    has_domains = "domain_train" in arrays
    if has_domains != ("domain_test" in arrays):
        raise DataError(f"{str(path)!r} has only one of domain_train and domain_test; give both or neither.")
    domain_names = _names(arrays, "domain_names", arrays["domain_train"], path) if has_domains else None
    train, test = (_images(arrays, split, path, store) for split in ("train", "test"))
    return Dataset(path.stem, train, test, class_names, domain_names, _usual_split(arrays, path))


def _read_arrays(path: Path) -> Arrays:
    try:
        # Opened here: NumPy leaks the handle of a path that is no archive.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            missing = [name for name in REQUIRED if name not in archive.files]
            if missing:
                found = ", ".join(sorted(archive.files)) or "nothing"
                raise DataError(f"{str(path)!r} lacks {', '.join(missing)}; it holds {found}.")
            names = [name for name in (*REQUIRED, *OPTIONAL) if name in archive.files]
            return {name: _plain_array(archive, name, path) for name in names}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"Cannot read {str(path)!r} as an .npz file; write it again with np.savez.") from error


def _plain_array(archive: Mapping[str, npt.NDArray[np.generic]], name: str, path: Path) -> npt.NDArray[np.generic]:
    try:
        return archive[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise DataError(
            f"Array {name!r} of {str(path)!r} holds Python objects, which are never unpickled;"
            " save it as a plain array, for example names.astype(str)."
        ) from error


def _images(
    arrays: Arrays, split: str, path: Path, make_store: Callable[[npt.NDArray[np.generic], str], PixelStore]
) -> ImageSet:
    store = make_store(arrays[f"x_{split}"], f"x_{split} of {path.name}")
    labels = _integers(arrays, f"y_{split}", len(store), path)
    domain_key = f"domain_{split}"
    domains = _integers(arrays, domain_key, len(store), path) if domain_key in arrays else None
    return ImageSet(store, labels, domains=domains)


def _integers(arrays: Arrays, name: str, count: int, path: Path) -> npt.NDArray[np.generic]:
    array = arrays[name]
    if array.shape != (count,) or not np.issubdtype(array.dtype, np.integer):
        raise DataError(
            f"{name} of {str(path)!r} must be {count} whole numbers, one per image;"
            f" got {array.dtype} of shape {array.shape}."
        )
    return array


def _names(arrays: Arrays, name: str, numbers: npt.NDArray[np.generic], path: Path) -> tuple[str, ...]:
    """Return the stored names, or the numbers themselves up to the largest in the train split."""
    if name in arrays:
        names = arrays[name]
        if names.ndim != 1 or names.dtype.kind not in "US":
            raise DataError(
                f"{name} of {str(path)!r} must be a list of text, got {names.dtype} of shape {names.shape}."
            )
        return tuple(str(entry) for entry in names.astype(str))
    if not np.issubdtype(numbers.dtype, np.integer):
        return ()
    return tuple(str(number) for number in range(count_labels(numbers, str(path))))


def _usual_split(arrays: Arrays, path: Path) -> tuple[int, int] | None:
    """Return the usual classes of the first and of later tasks, if the file says so."""
    if "split" not in arrays:
        return None
    initial, increment = _integers(arrays, "split", 2, path).tolist()
    return int(initial), int(increment)
