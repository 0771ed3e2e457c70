"""Spread over seeds, and differences between two ways that share their seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (n - 1) of a number over seeds; the deviation of one seed is NaN."""

    mean: float
    std: float
    n: int

    def text(self, digits: int = 2, scale: float = 1.0, sign: str = "") -> str:
        """Return mean and deviation for people.

        >>> Spread(0.8234, 0.01, 3).text(scale=100)
        '82.34 ± 1.00'
        """
        if math.isnan(self.mean):
            return "-"
        deviation = "" if math.isnan(self.std) else f" ± {scale * self.std:.{digits}f}"
        return f"{scale * self.mean:{sign}.{digits}f}{deviation}"


@dataclass(frozen=True)
class PairedDifference(Spread):
    """Mean and standard deviation of the differences seed by seed, and the p-value of the paired t-test.

    ``p`` is NaN for fewer than two pairs, or if all differences are equal: the test is undefined then.
    """

    p: float

    def text(self, digits: int = 2, scale: float = 1.0, sign: str = "+") -> str:
        """Return the difference for people.

        >>> PairedDifference(0.01, 0.002, 3, 0.0132).text(scale=100)
        '+1.00 ± 0.20 (p 0.013)'
        """
        return super().text(digits, scale, sign) + ("" if math.isnan(self.p) else f" (p {self.p:.2g})")


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of a number over seeds.

    >>> spread([1.0, 2.0, 3.0])
    Spread(mean=2.0, std=1.0, n=3)
    """
    array = np.asarray(values, dtype=np.float64)
    std = float(array.std(ddof=1)) if len(array) > 1 else float("nan")
    return Spread(float(array.mean()) if len(array) else float("nan"), std, len(array))


def paired_difference(values: Sequence[float], reference: Sequence[float]) -> PairedDifference:
    """Return how ``values`` differ from ``reference``, pair by pair; the two-sided paired t-test gives ``p``.

    >>> paired_difference([2.0, 4.0], [1.0, 2.0]).mean
    1.5
    """
    if len(values) != len(reference):
        raise ValueError(f"Pairs need two lists of one length, got {len(values)} and {len(reference)}.")
    differences = np.subtract(values, reference, dtype=np.float64)
    found = spread(differences.tolist())
    mean, std, n = found.mean, found.std, found.n
    # Differences that are equal but for rounding have no spread to test against.
    # ``not >`` instead of ``<=``: a NaN among them has no test, either.
    if n < 2 or not std > 1e-12 * max(1.0, abs(mean)):
        return PairedDifference(mean, std, n, float("nan"))
    # Imported here: help, lists and errors of the command line must not wait for scipy.
    from scipy.stats import ttest_1samp

    return PairedDifference(mean, std, n, float(ttest_1samp(differences, 0.0).pvalue))
