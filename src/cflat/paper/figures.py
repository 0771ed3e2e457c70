"""The picture of a reproduced table: gains over the first lines, or curves over a setting or the tasks."""

from __future__ import annotations

from statistics import fmean as mean

from cflat.config.documents import flatten, merge
from cflat.figures.model import Bars, Curve, FigureData, Panel
from cflat.paper.contrasts import ACCURACY, Contrast, contrasts
from cflat.paper.measures import unit_of
from cflat.paper.reproduce import HERE, PAPER, SPEED, Reproduction


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
    caption = f"Scale {found.scale}, {found.repeats}. {found.meaning}"
    return FigureData(exhibit.name, exhibit.title, panels, caption, num_columns=2) if panels else None


def _gains(found: Reproduction) -> list[Panel]:
    every = [contrast for contrast in contrasts(found) if contrast.measured is not None]
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
    for metric in (ACCURACY, SPEED):
        for where in (HERE, PAPER):
            curves: dict[str, list[tuple[float, float]]] = {}
            for line, cells in zip(found.exhibit.rows, found.entries, strict=True):
                settings = flatten(merge(found.exhibit.settings, line.settings))
                name = "" if by is None else f"{by.rpartition('.')[2]} = {settings[by]}"
                for entry in cells[0]:
                    number = entry.number(where)
                    if entry.metric == metric and number is not None:
                        curves.setdefault(name or entry.title, []).append((float(settings[x]), number.mean))
            marks = [_curve(name, points) for name, points in curves.items()]
            if marks:
                title = f"{unit_of(metric).title}, {where}"
                panels.append(Panel(title, x.rpartition(".")[2], unit_of(metric).title, marks))
    return panels


def _over_tasks(found: Reproduction, stages: int) -> list[Panel]:
    panels = []
    for where in (HERE, PAPER):
        marks = []
        for line, cells in zip(found.exhibit.rows, found.entries, strict=True):
            numbers = [entry.number(where) for entry in cells[0][:stages]]
            points = [(stage + 1.0, number.mean) for stage, number in enumerate(numbers) if number is not None]
            if points:
                marks.append(_curve(line.name, points))
        if marks:
            panels.append(Panel(f"Accuracy over the stream, {where}", "tasks learned", "accuracy (%)", marks))
    return panels


def _curve(name: str, points: list[tuple[float, float]]) -> Curve:
    ordered = sorted(points)
    return Curve(name, [x for x, _ in ordered], [y for _, y in ordered], style="line+points")
