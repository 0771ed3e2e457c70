"""`ArrayVectors`: one vector for each image, such as the features of a frozen backbone, in the place of pixels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from cflat._errors import DataError
from cflat.data.images import ImageSet
from cflat.data.pixels import ArrayStore


class ArrayVectors(ArrayStore):
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
        super().__init__(torch.from_numpy(vectors), name)

    @property
    def size(self) -> int:
        """Numbers per vector."""
        return self._values.shape[1]


def vector_size(images: ImageSet) -> int | None:
    """Return the numbers per image of a set that holds vectors, and None for one that holds pixels."""
    return images.store.size if isinstance(images.store, ArrayVectors) else None
