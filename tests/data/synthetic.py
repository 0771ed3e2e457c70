"""Small datasets made of numbers, for tests that need no files."""

from __future__ import annotations

import numpy as np

from cflat.data import Dataset, ImageSet
from cflat.data.pixels import ArrayPixels


def image_set(labels, *, size=4, domains=None, offset=0):
    """Images whose first pixel value tells their row."""
    labels = np.asarray(labels, dtype=np.int64)
    rng = np.random.default_rng(offset)
    pixels = rng.integers(0, 256, (len(labels), size, size, 3), dtype=np.uint8)
    pixels[:, 0, 0, 0] = (np.arange(len(labels)) + offset) % 256
    return ImageSet(ArrayPixels(pixels), labels, domains=domains)


def dataset(num_classes, *, train_per_class=3, test_per_class=2, num_domains=0, seed=0):
    """A shuffled dataset; with domains, every class has that many images in each of them."""
    rng = np.random.default_rng(seed)

    def split(per_class, offset):
        groups = [
            (label, domain)
            for label in range(num_classes)
            for domain in range(max(1, num_domains))
            for _ in range(per_class)
        ]
        order = rng.permutation(len(groups))
        labels, domains = np.asarray(groups)[order].T
        return image_set(labels, domains=domains if num_domains else None, offset=offset)

    names = tuple(f"class {label}" for label in range(num_classes))
    domain_names = tuple(f"domain {domain}" for domain in range(num_domains)) or None
    return Dataset("synthetic", split(train_per_class, 0), split(test_per_class, 100), names, domain_names)
