"""What a line of a reproduced table gains over the first of its group, here and in the paper."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cflat.metrics import Spread, paired_difference
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
            ours, theirs = own[ACCURACY], first[ACCURACY]
            both = ours.measured is not None and theirs.measured is not None
            change = paired_difference(ours.by_seed, theirs.by_seed) if both else None
            speeds = [cell[SPEED] for cell in (own, first) if SPEED in cell]
            yield Contrast(
                line.group,
                column.name,
                line.name,
                reference.name,
                None if change is None else change.mean,
                0.0 if change is None or math.isnan(change.std) else change.std,
                ours.published.mean - theirs.published.mean if ours.published and theirs.published else None,
                _ratio([entry.measured for entry in speeds]),
                _ratio([entry.published for entry in speeds]),
            )


def _ratio(speeds: Sequence[Spread | None]) -> float | None:
    known = [speed.mean for speed in speeds if speed is not None]
    return 100 * known[0] / known[1] if len(known) == 2 and known[1] else None
