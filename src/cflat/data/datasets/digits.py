"""Digits: 8 x 8 grey images that come with scikit-learn, so that a first run needs no files."""

from __future__ import annotations

import numpy as np

from cflat.data.catalog import DatasetSpec, Source, register_dataset
from cflat.data.dataset import Dataset
from cflat.data.images import ImageSet
from cflat.data.pixels import ArrayPixels

__all__ = ["load_digits"]

TEST_EVERY = 5
"""In each class, in the order of the file, every fifth image is a test image."""


@register_dataset(
    DatasetSpec(
        name="digits",
        title="Digits",
        layout="nothing: the images come with scikit-learn",
        licence="CC BY 4.0 (UCI, Optical Recognition of Handwritten Digits)",
        num_classes=10,
        num_train=1442,
        num_test=355,
        split=(2, 2),
        preset="none",
    )
)
def load_digits(source: Source) -> Dataset:
    """Load the embedded digits with a fixed split."""
    from sklearn.datasets import load_digits as load

    raw = load()
    pixels = np.rint(raw.images * (255 / 16)).astype(np.uint8)
    place_in_class = np.zeros(len(raw.target), dtype=np.int64)
    for label in range(10):
        members = raw.target == label
        place_in_class[members] = np.arange(members.sum())
    is_test = place_in_class % TEST_EVERY == TEST_EVERY - 1
    train, test = (
        ImageSet(ArrayPixels(pixels[chosen], f"digits {split}"), raw.target[chosen])
        for split, chosen in (("train", ~is_test), ("test", is_test))
    )
    return Dataset("digits", train, test, tuple(str(digit) for digit in range(10)))
