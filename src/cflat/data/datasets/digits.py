"""Digits: 8 x 8 grey images that come with scikit-learn, so that a first run needs no files, upright and turned."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cflat.data.catalog import DatasetSpec, Source, register_dataset
from cflat.data.dataset import Dataset
from cflat.data.images import ImageSet
from cflat.data.pixels import ArrayPixels, Indices

Grey: TypeAlias = npt.NDArray[np.uint8]

TEST_EVERY = 5
"""In each class (and domain), in the order of the file, every fifth image is a test image."""
TURNS = ("upright", "left", "upside_down", "right")
"""Quarter turns against the clock; each image of a class, in the order of the file, gets the next."""


def _spec(name: str, title: str, **more: Any) -> DatasetSpec:
    return DatasetSpec(
        name=name,
        title=title,
        layout="nothing: the images come with scikit-learn",
        licence="CC BY 4.0 (UCI, Optical Recognition of Handwritten Digits)",
        num_classes=10,
        preset="none",
        **more,
    )


@register_dataset(_spec("digits", "Digits", num_train=1442, num_test=355, split=(2, 2)))
def load_digits(source: Source) -> Dataset:
    """Load the embedded digits with a fixed split."""
    pixels, labels, place = _read()
    return _dataset("digits", pixels, labels, place % TEST_EVERY == TEST_EVERY - 1)


@register_dataset(_spec("rotated_digits", "Rotated digits", num_train=1447, num_test=350, domains=TURNS))
def load_rotated_digits(source: Source) -> Dataset:
    """Load the embedded digits as four domains; no image is in two of them."""
    pixels, labels, place = _read()
    domains = place % len(TURNS)
    turned = np.stack([np.rot90(image, k=domain) for image, domain in zip(pixels, domains, strict=True)])
    is_test = place // len(TURNS) % TEST_EVERY == TEST_EVERY - 1
    return _dataset("rotated_digits", turned, labels, is_test, domains)


def _read() -> tuple[Grey, Indices, Indices]:
    """Return images, labels, and the place of each image among those of its class."""
    from sklearn.datasets import load_digits as load

    raw = load()
    pixels = np.rint(raw.images * (255 / 16)).astype(np.uint8)
    labels = np.asarray(raw.target, dtype=np.int64)
    place_in_class = np.zeros(len(labels), dtype=np.int64)
    for label in range(10):
        members = labels == label
        place_in_class[members] = np.arange(members.sum())
    return pixels, labels, place_in_class


def _dataset(
    name: str, pixels: Grey, labels: Indices, is_test: npt.NDArray[np.bool_], domains: Indices | None = None
) -> Dataset:
    train, test = (
        ImageSet(
            ArrayPixels(pixels[chosen], f"{name} {split}"),
            labels[chosen],
            domains=None if domains is None else domains[chosen],
        )
        for split, chosen in (("train", ~is_test), ("test", is_test))
    )
    class_names = tuple(str(digit) for digit in range(10))
    return Dataset(name, train, test, class_names, domain_names=None if domains is None else TURNS)
