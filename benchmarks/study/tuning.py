"""How a row's rate and radius are chosen: the same trials for every row, and two more beyond an edge. Frozen.

The trials of a stream are a Latin square in the logarithms of rate and radius. A row's score is its mean Avg on
validation images over the tuning replicates. If the best trial has the lowest or highest rate (or radius) of all, two
more trials go beyond it in that direction, once; the best of all trials is the choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.study.definition import EXTRA_STEP, EXTRA_TRIALS, Row, Stream

Scores = Mapping[int, Sequence[float]]
"""Avg of the tuning replicates, by trial."""


@dataclass(frozen=True)
class Place:
    """A trial, as fractions of the ranges in the logarithm; 0 and 1 are the ends of a range."""

    rate: float
    radius: float


@dataclass(frozen=True)
class Settings:
    """What a row is run with."""

    lr: float
    rho: float | None = None


@dataclass(frozen=True)
class Choice:
    """The best trial."""

    trial: int
    settings: Settings
    is_at_edge: bool
    """No trial went further in some direction: the best may lie beyond."""


def places(count: int) -> list[Place]:
    """Return the trials that every row gets: each of ``count`` rates once, each of ``count`` radii once.

    >>> [(place.rate, place.radius) for place in places(4)]
    [(0.125, 0.375), (0.375, 0.875), (0.625, 0.125), (0.875, 0.625)]
    """
    radii = [(count // 2) * number % (count + 1) - 1 for number in range(1, count + 1)]
    return [Place((number + 0.5) / count, (radius + 0.5) / count) for number, radius in enumerate(radii)]


def settings_at(place: Place, stream: Stream, row: Row) -> Settings:
    """Return the rate and radius of a place, to three digits."""
    lr = _between(stream.rates, place.rate) * row.rate
    return Settings(
        _rounded(lr), None if row.radius is None else _rounded(_between(stream.radii, place.radius) * row.radius)
    )


def extra_places(best: Place, tried: Sequence[Place], has_radius: bool) -> list[Place]:
    """Return the trials beyond the edge that the best one lies at; none if it lies at none."""
    rate = _side(best.rate, [place.rate for place in tried])
    radius = _side(best.radius, [place.radius for place in tried]) if has_radius else 0
    if rate == radius == 0:
        return []
    steps = [EXTRA_STEP * number for number in range(1, EXTRA_TRIALS + 1)]
    return [Place(best.rate + rate * step, best.radius + radius * step) for step in steps]


def trials_of(scores: Scores, row: Row, count: int, replicates: int) -> list[Place]:
    """Return the trials that a row needs, as far as its scores tell: also the extra ones, once the others are done."""
    first = places(count)
    if not _are_done(scores, range(count), replicates):
        return first
    return first + extra_places(first[_best(scores, range(count))], first, row.radius is not None)


def choose(scores: Scores, stream: Stream, row: Row, count: int, replicates: int) -> Choice | None:
    """Return the best trial, or None while trials are missing."""
    tried = trials_of(scores, row, count, replicates)
    if not _are_done(scores, range(len(tried)), replicates):
        return None
    best = _best(scores, range(len(tried)))
    beyond = extra_places(tried[best], tried, row.radius is not None)
    return Choice(best, settings_at(tried[best], stream, row), bool(beyond))


def _are_done(scores: Scores, trials: Sequence[int], replicates: int) -> bool:
    return all(len(scores.get(trial, ())) >= replicates for trial in trials)


def _best(scores: Scores, trials: Sequence[int]) -> int:
    """Return the trial with the highest mean; the first of equal ones, which has the lowest rate."""
    return max(trials, key=lambda trial: (sum(scores[trial]) / len(scores[trial]), -trial))


def _side(value: float, tried: Sequence[float]) -> int:
    return int(value == max(tried)) - int(value == min(tried))


def _between(ends: tuple[float, float], fraction: float) -> float:
    low, high = map(math.log, ends)
    return math.exp(low + fraction * (high - low))


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
