"""Digits: 8 x 8 grey images that come with scikit-learn, upright and turned: a first run needs no files."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cflat.data.catalog import DatasetSpec, Source, register_dataset
from cflat.data.dataset import Dataset
from cflat.data.images import ImageSet
from cflat.data.pixels import ArrayPixels

TEST_EVERY = 5
"""In each class (and domain), in the order of the file, every fifth image is a test image."""
TURNS = ("upright", "left", "upside_down", "right")
"""Quarter turns against the clock; each image of a class, in the order of the file, gets the next."""


def _load(name: str, turns: tuple[str, ...] = ()) -> Dataset:
    from sklearn.datasets import load_digits as load

    raw = load()
    # scikit-learn's values are 0 to 16.
    pixels = np.rint(raw.images * (255 / 16)).astype(np.uint8)
    labels = np.asarray(raw.target, dtype=np.int64)
    place = np.zeros_like(labels)  # of each image among those of its class
    for label in range(10):
        members = labels == label
        place[members] = np.arange(members.sum())
    domains = place % len(turns) if turns else None
    if domains is not None:
        pixels = np.stack([np.rot90(image, k=domain) for image, domain in zip(pixels, domains, strict=True)])
    is_test = place // max(1, len(turns)) % TEST_EVERY == TEST_EVERY - 1
    train, test = (
        ImageSet(
            ArrayPixels(pixels[chosen], f"{name} {split}"),
            labels[chosen],
            domains=None if domains is None else domains[chosen],
        )
        for split, chosen in (("train", ~is_test), ("test", is_test))
    )
    return Dataset(name, train, test, tuple(map(str, range(10))), domain_names=turns or None)


DIGITS = DatasetSpec(
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
ROTATED = replace(
    DIGITS, name="rotated_digits", title="Rotated digits", num_train=1447, num_test=350, split=None, domains=TURNS
)


@register_dataset(DIGITS)
def load_digits(source: Source) -> Dataset:
    """Load the embedded digits with a fixed split."""
    return _load("digits")


@register_dataset(ROTATED)
def load_rotated_digits(source: Source) -> Dataset:
    """Load the embedded digits as four domains; no image is in two of them."""
    return _load("rotated_digits", TURNS)
