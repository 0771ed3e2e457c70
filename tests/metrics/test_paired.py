"""Spread and paired differences against scipy and by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from cflat.metrics import paired_difference, spread

ACCURACIES = st.floats(0, 1).map(lambda value: round(value, 4))


@given(st.lists(st.tuples(ACCURACIES, ACCURACIES), min_size=2, max_size=8))
def test_paired_differences_are_those_of_scipy(pairs: list[tuple[float, float]]) -> None:
    new, old = [list(column) for column in zip(*pairs, strict=True)]
    found = paired_difference(new, old)
    assert found.n == len(pairs)
    assert found.mean == pytest.approx(sum(new) / len(new) - sum(old) / len(old), abs=1e-12)
    if len({round(a - b, 9) for a, b in pairs}) == 1:
        assert math.isnan(found.p)
    else:
        assert found.p == pytest.approx(ttest_rel(new, old).pvalue)


@given(st.lists(st.tuples(ACCURACIES, ACCURACIES), max_size=6))
def test_the_reference_compared_with_itself_does_not_differ(pairs: list[tuple[float, float]]) -> None:
    values = [a for a, _ in pairs]
    found = paired_difference(values, values)
    assert found.mean == 0 or (not values and math.isnan(found.mean))
    assert math.isnan(found.p)


def test_one_seed_has_a_mean_but_no_spread() -> None:
    found = spread([0.5])
    assert (found.mean, found.n) == (0.5, 1)
    assert math.isnan(found.std)
    assert math.isnan(paired_difference([0.5], [0.25]).p)


def test_unequal_lists_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="got 1 and 2"):
        paired_difference([0.1], [0.1, 0.2])
