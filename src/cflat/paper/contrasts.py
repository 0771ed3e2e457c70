"""What a line of a reproduced table gains over the first of its group, here and in the paper."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from cflat.metrics import paired_difference
from cflat.paper.exhibits import Line
from cflat.paper.reproduce import SPEED, Entry, Reproduction

ACCURACY = "avg"


@dataclass(frozen=True)
class Contrast:
    """A line against the first of its group, in one column."""

    group: str
    column: str
    line: str
    reference: str
    measured: float | None
    deviation: float
    published: float | None
    speed: float | None
    """Relative to the reference."""
    published_speed: float | None


def contrasts(found: Reproduction) -> Iterator[Contrast]:
    """Yield every line with an accuracy, column by column."""
    for index, column in enumerate(found.exhibit.columns):
        firsts: dict[str, tuple[Line, dict[str, Entry]]] = {}
        for line, cells in zip(found.exhibit.rows, found.entries, strict=True):
            own = {entry.metric: entry for entry in cells[index]}
            reference, first = firsts.setdefault(line.group, (line, own))
            if reference is line or ACCURACY not in own:
                continue
            difference = _difference(own[ACCURACY], first[ACCURACY])
            yield Contrast(
                line.group,
                column.name,
                line.name,
                reference.name,
                None if difference is None else difference[0],
                0.0 if difference is None or math.isnan(difference[1]) else difference[1],
                _published_difference(own[ACCURACY], first[ACCURACY]),
                _ratio(own, first, is_published=False),
                _ratio(own, first, is_published=True),
            )


def _difference(own: Entry, first: Entry) -> tuple[float, float] | None:
    if own.measured is None or first.measured is None:
        return None
    found = paired_difference(own.by_seed, first.by_seed)
    return found.mean, found.std


def _published_difference(own: Entry, first: Entry) -> float | None:
    if own.published is None or first.published is None:
        return None
    return own.published.mean - first.published.mean


def _ratio(own: dict[str, Entry], first: dict[str, Entry], *, is_published: bool) -> float | None:
    if SPEED not in own:
        return None
    values = [entry[SPEED].published if is_published else entry[SPEED].measured for entry in (own, first)]
    if values[0] is None or values[1] is None or not values[1].mean:
        return None
    return 100 * values[0].mean / values[1].mean
