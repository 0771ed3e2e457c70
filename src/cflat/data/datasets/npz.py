"""``npz:PATH``: arrays in one NumPy file."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cflat._errors import DataError
from cflat.data.catalog import DatasetSpec, Source, register_dataset
from cflat.data.dataset import Dataset
from cflat.data.images import ImageSet
from cflat.data.pixels import ArrayPixels

__all__ = ["load_npz"]

REQUIRED = ("x_train", "y_train", "x_test", "y_test")
OPTIONAL = ("class_names", "domain_train", "domain_test", "domain_names")


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
    path = source.find()
    arrays = _read_arrays(path)
    class_names = _names(arrays, "class_names", arrays["y_train"], path)
    has_domains = "domain_train" in arrays
    if has_domains != ("domain_test" in arrays):
        raise DataError(f"{str(path)!r} has only one of domain_train and domain_test; give both or neither.")
    domain_names = _names(arrays, "domain_names", arrays["domain_train"], path) if has_domains else None
    return Dataset(
        path.stem, _split(arrays, "train", path), _split(arrays, "test", path), class_names, domain_names
    )


def _read_arrays(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    name = ""
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in REQUIRED if name not in archive.files]
            if missing:
                found = ", ".join(sorted(archive.files)) or "nothing"
                raise DataError(f"{str(path)!r} lacks {', '.join(missing)}; it holds {found}.")
            arrays = {}
            for name in (*REQUIRED, *OPTIONAL):
                if name in archive.files:
                    arrays[name] = archive[name]
            return arrays
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise DataError(f"Cannot read {str(path)!r}: {error}.") from error
        what = f"Array {name!r} of" if name else "The file"
        raise DataError(
            f"{what} {str(path)!r} holds Python objects, which are never unpickled;"
            " save plain arrays, for example names.astype(str)."
        ) from error
    except (OSError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"Cannot read {str(path)!r} as an .npz file: {str(error) or 'it is broken'}."
        ) from error


def _split(arrays: dict[str, npt.NDArray[np.generic]], split: str, path: Path) -> ImageSet:
    store = ArrayPixels(arrays[f"x_{split}"], f"x_{split} of {path.name}")  # type: ignore[arg-type]
    labels = _integers(arrays, f"y_{split}", len(store), path)
    domain_key = f"domain_{split}"
    domains = _integers(arrays, domain_key, len(store), path) if domain_key in arrays else None
    return ImageSet(store, labels, domains=domains)


def _integers(
    arrays: dict[str, npt.NDArray[np.generic]], name: str, count: int, path: Path
) -> npt.NDArray[np.generic]:
    array = arrays[name]
    if array.shape != (count,) or not np.issubdtype(array.dtype, np.integer):
        raise DataError(
            f"{name} of {str(path)!r} must be {count} whole numbers, one per image;"
            f" got {array.dtype} of shape {array.shape}."
        )
    return array


def _names(
    arrays: dict[str, npt.NDArray[np.generic]], name: str, numbers: npt.NDArray[np.generic], path: Path
) -> tuple[str, ...]:
    """Return the stored names, or the numbers themselves up to the largest in the train split."""
    if name in arrays:
        names = arrays[name]
        if names.ndim != 1 or names.dtype.kind not in "US":
            raise DataError(
                f"{name} of {str(path)!r} must be a list of text, got {names.dtype} of shape {names.shape}."
            )
        return tuple(str(entry) for entry in names.astype(str))
    highest = int(numbers.max(initial=-1)) if np.issubdtype(numbers.dtype, np.integer) else -1
    return tuple(str(number) for number in range(highest + 1))
