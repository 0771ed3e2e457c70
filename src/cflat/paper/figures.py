"""What the lines of a reproduced table gain over the first of their group, and the picture of the table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean as mean

from cflat.config.documents import flatten, merge
from cflat.figures.figure import Bars, Curve, FigureData, Panel
from cflat.metrics import Spread, paired_difference
from cflat.paper.exhibits import Line
from cflat.paper.measures import unit_of
from cflat.paper.reproduce import HERE, PAPER, SPEED, Entry, Reproduction

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


def picture(found: Reproduction) -> FigureData | None:
    """Draw the numbers: over a setting, over the tasks, or as gains over the first line of each group."""
    exhibit = found.exhibit
    if exhibit.needs_no_run or not (exhibit.rows and exhibit.columns):
        return None
    if exhibit.draw.x is not None:
        panels = _over_setting(found, exhibit.draw.x, exhibit.draw.by)
    elif exhibit.draw.stages:
        panels = _over_tasks(found, exhibit.draw.stages)
    else:
        panels = _gains(found)
    caption = f"Scale {found.scale}, {found.repeats}. {found.meaning}".strip()
    return FigureData(exhibit.name, exhibit.title, panels, caption, num_columns=2) if panels else None


def contrasts(found: Reproduction) -> Iterator[Contrast]:
    """Yield every line with an accuracy, column by column."""
    for index, column in enumerate(found.exhibit.columns):
        firsts: dict[str, tuple[Line, dict[str, Entry]]] = {}
        for line, cells in zip(found.exhibit.rows, found.entries, strict=True):
            own = {entry.metric: entry for entry in cells[index]}
            # The first line of a group is the optimizer that the others are added to.
            reference, first = firsts.setdefault(line.group, (line, own))
            if reference is line or ACCURACY not in own:
                continue
            ours, theirs = own[ACCURACY], first[ACCURACY]
            both = ours.measured is not None and theirs.measured is not None
            # Both follow the seeds of the plan, so pairs are formed by position.
            change = paired_difference(ours.by_seed, theirs.by_seed) if both else None
            measured = None if change is None else change.mean
            deviation = 0.0 if change is None or math.isnan(change.std) else change.std  # one seed has none
            published = ours.published.mean - theirs.published.mean if ours.published and theirs.published else None
            speeds = [cell[SPEED] for cell in (own, first) if SPEED in cell]
            ratios = _ratio([entry.measured for entry in speeds]), _ratio([entry.published for entry in speeds])
            names = (line.group, column.name, line.name, reference.name)
            yield Contrast(*names, measured, deviation, published, *ratios)


def _ratio(speeds: Sequence[Spread | None]) -> float | None:
    known = [speed.mean for speed in speeds if speed is not None]
    return 100 * known[0] / known[1] if len(known) == 2 and known[1] else None


def _gains(found: Reproduction) -> list[Panel]:
    every = [contrast for contrast in contrasts(found) if contrast.measured is not None]
    # With one group the columns are compared; with several, each method over all of its columns.
    by_group = len({contrast.group for contrast in every}) > 1
    kinds: dict[str, dict[str, list[Contrast]]] = {}
    for contrast in every:
        category = contrast.group if by_group else contrast.column or contrast.group
        kinds.setdefault(contrast.line, {}).setdefault(category, []).append(contrast)
    panels = []
    reference = every[0].reference if every else ""
    for title, label, keys in (
        (f"Average accuracy against {reference}", "points", ("measured", "published")),
        (f"Speed against {reference}", "percent of its images per second", ("speed", "published_speed")),
    ):
        marks = []
        for line, categories in kinds.items():
            for key, where in zip(keys, (HERE, PAPER), strict=True):
                values = {
                    category: [value for member in members if (value := getattr(member, key)) is not None]
                    for category, members in categories.items()
                }
                known = {category: mean(numbers) for category, numbers in values.items() if numbers}
                if known:
                    deviations = [mean([member.deviation for member in categories[c]]) for c in known]
                    shown = deviations if key == "measured" and any(deviations) else None
                    marks.append(Bars(f"{line}, {where}", list(known), list(known.values()), shown))
        if marks:
            panels.append(Panel(title, "", label, marks))
    return panels


def _over_setting(found: Reproduction, x: str, by: str | None) -> list[Panel]:
    panels = []
    for metric, where in product((ACCURACY, SPEED), (HERE, PAPER)):
        curves: dict[str, list[tuple[float, float]]] = {}
        for line, cells in zip(found.exhibit.rows, found.entries, strict=True):
            settings = flatten(merge(found.exhibit.settings, line.settings))
            name = "" if by is None else f"{by.rpartition('.')[2]} = {settings[by]}"
            for entry in cells[0]:
                number = entry.number(where)
                if entry.metric == metric and number is not None:
                    curves.setdefault(name or entry.title, []).append((float(settings[x]), number.mean))
        title = unit_of(metric).title
        panels += _panel(f"{title}, {where}", x.rpartition(".")[2], title, curves.items())
    return panels


def _over_tasks(found: Reproduction, stages: int) -> list[Panel]:
    panels = []
    for where in (HERE, PAPER):
        curves = []
        for line, cells in zip(found.exhibit.rows, found.entries, strict=True):
            numbers = [entry.number(where) for entry in cells[0][:stages]]
            points = [(stage + 1.0, number.mean) for stage, number in enumerate(numbers) if number is not None]
            curves.append((line.name, points))
        panels += _panel(f"Accuracy over the stream, {where}", "tasks learned", "accuracy (%)", curves)
    return panels


def _panel(title: str, x: str, y: str, curves: Iterable[tuple[str, list[tuple[float, float]]]]) -> list[Panel]:
    """Return a panel with the curves that have points; none if no curve has any."""
    marks = []
    for name, points in curves:
        if points:
            xs, ys = zip(*sorted(points), strict=True)
            marks.append(Curve(name, list(xs), list(ys), style="line+points"))
    return [Panel(title, x, y, marks)] if marks else []
