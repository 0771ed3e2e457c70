"""`ImageSet`: labelled images whose pixels are read on request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cflat.data.pixels import ArrayVectors, Indices, Pixels, PixelStore


class ImageSet:
    """Labelled images of one dataset split; slicing copies three integers per image and no pixels.

    Args:
        store: The pixels of the whole split.
        labels: One label per image.
        rows: Row of each image in the store; by default all rows in order. Rows stay with their image through
            every selection: they are stable keys for per-image caches and for resume.
        domains: Domain index of each image, for datasets that have domains.

    >>> from cflat.data.pixels import ArrayPixels
    >>> images = ImageSet(ArrayPixels(np.zeros((4, 8, 8, 3), np.uint8)), [0, 1, 0, 1])
    >>> images.of_classes([1]).rows
    array([1, 3])
    """

    def __init__(
        self,
        store: PixelStore,
        labels: npt.ArrayLike,
        *,
        rows: npt.ArrayLike | None = None,
        domains: npt.ArrayLike | None = None,
    ) -> None:
        self.store = store
        self.labels: Indices = np.asarray(labels, dtype=np.int64)
        self.rows: Indices = np.asarray(np.arange(len(store)) if rows is None else rows, dtype=np.int64)
        self.domains: Indices | None = None if domains is None else np.asarray(domains, dtype=np.int64)
        for name, column in (("labels", self.labels), ("domains", self.domains)):
            if column is not None and column.shape != self.rows.shape:
                raise ValueError(f"{name} must have one entry for each of {self.rows.size} images, got {column.shape}.")

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"ImageSet({len(self)} images, {len(np.unique(self.labels))} classes)"

    def select(self, indices: npt.ArrayLike) -> ImageSet:
        """Return the images at these positions (or where a boolean mask is true), in the given order."""
        chosen = np.asarray(indices)
        # NumPy makes floats of an empty list, which cannot be indices.
        if chosen.size == 0:
            chosen = chosen.astype(np.int64)
        domains = None if self.domains is None else self.domains[chosen]
        return ImageSet(self.store, self.labels[chosen], rows=self.rows[chosen], domains=domains)

    def of_classes(self, classes: Iterable[int]) -> ImageSet:
        """Return the images whose label is one of ``classes``."""
        return self.select(np.isin(self.labels, np.fromiter(classes, dtype=np.int64)))

    def with_labels(self, labels: npt.ArrayLike) -> ImageSet:
        """Return the same images under other labels."""
        return ImageSet(self.store, labels, rows=self.rows, domains=self.domains)

    def pixels(self, indices: npt.ArrayLike) -> Pixels:
        """Return uint8 images (3, H, W): one stacked tensor when their sizes agree, else a list."""
        return self.store.read(self.rows[np.asarray(indices, dtype=np.int64)])

    def pixel_parts(self, indices: npt.ArrayLike, decoded: Mapping[int, Tensor] | None = None) -> Iterator[Pixels]:
        """Yield what `pixels` returns in parts, so that large image files do not fill the memory.

        ``decoded`` holds images of a `FilePixels`, by row, that have been decoded already.
        """
        return self.store.read_parts(self.rows[np.asarray(indices, dtype=np.int64)], decoded)

    @staticmethod
    def concat(sets: Sequence[ImageSet]) -> ImageSet:
        """Join images of one split, for example a task's images and exemplars of earlier tasks."""
        if not sets:
            raise ValueError("ImageSet.concat needs at least one set, got none.")
        first = sets[0]
        if any(other.store is not first.store for other in sets):
            raise ValueError("ImageSet.concat joins images of one split only: row numbers of two splits would clash.")
        domains = [part.domains for part in sets if part.domains is not None]
        return ImageSet(
            first.store,
            np.concatenate([part.labels for part in sets]),
            rows=np.concatenate([part.rows for part in sets]),
            domains=np.concatenate(domains) if len(domains) == len(sets) else None,
        )


def vector_size(images: ImageSet) -> int | None:
    """Return the numbers per image of a set that holds vectors, and None for one that holds pixels."""
    return images.store.size if isinstance(images.store, ArrayVectors) else None
