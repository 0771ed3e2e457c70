"""`ArrayVectors`: one vector for each image, such as the features of a frozen backbone, in the place of pixels."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cflat._errors import DataError
from cflat.data.images import ImageSet
from cflat.data.pixels import Indices

__all__ = ["ArrayVectors", "vector_size"]


class ArrayVectors:
    """Hold float32 vectors in memory, addressed by row like the pixels of an image.

    Args:
        array: (N, D) floats, all finite.
        name: What messages call the array.
    """

    def __init__(self, array: npt.NDArray[np.generic], name: str = "vectors") -> None:
        if array.ndim != 2 or array.shape[1] == 0 or not np.issubdtype(array.dtype, np.floating):
            raise DataError(
                f"{name} holds {array.dtype} values of shape {array.shape}; expected floats, (images, features)."
            )
        vectors = np.ascontiguousarray(array, dtype=np.float32)
        wrong = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(wrong):
            raise DataError(f"{name}[{wrong[0]}] is not finite ({len(wrong)} such vectors); recompute the features.")
        self.name = name
        self._vectors = torch.from_numpy(vectors)

    def __len__(self) -> int:
        return len(self._vectors)

    @property
    def size(self) -> int:
        """Numbers per vector."""
        return self._vectors.shape[1]

    def read(self, rows: Indices) -> Tensor:
        """Return the vectors of these rows, (B, D)."""
        return self._vectors[torch.from_numpy(np.ascontiguousarray(rows))]

    def content(self, row: int) -> bytes:
        """Return the raw numbers of one vector."""
        return self._vectors[row].numpy().tobytes()

    def describe(self, row: int) -> str:
        """Name a vector by the array and its row."""
        return f"{self.name}[{row}]"

    def fingerprint(self, rows: Indices | None = None) -> str:
        """Hash shape and numbers, always of all rows."""
        digest = hashlib.blake2b(str(tuple(self._vectors.shape)).encode(), digest_size=16)
        digest.update(self._vectors.numpy().data)
        return digest.hexdigest()


def vector_size(images: ImageSet) -> int | None:
    """Return the numbers per image of a set that holds vectors, and None for one that holds pixels."""
    return images.store.size if isinstance(images.store, ArrayVectors) else None
