"""The picture of a sweep: lines over one number, colours over two, points over more, bars where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cflat.figures.model import Bars, Curve, FigureData, Heatmap, Panel
from cflat.figures.runs import SPREAD, SweepPoint, sensitivity, spans_decades

MAX_BARS = 12
MAX_PANELS = 4
MAX_CELLS = 12
"""Rows or columns of a heat map whose cells still hold a number each."""
ACCURACY = "average accuracy (%)"


@dataclass(frozen=True)
class SweepCase:
    """One combination of settings, with one entry for each seed."""

    settings: Mapping[str, Any]
    """Values by dotted key; a key that the combination does not have is absent."""
    accuracy: Sequence[float]
    images_per_second: Sequence[float]

    @property
    def percent(self) -> float:
        """The mean accuracy."""
        return 100 * float(np.mean(self.accuracy))

    def name(self, without: Sequence[str] = ()) -> str:
        """Return what sets it apart, leaving some keys out."""
        shown = [(key, value) for key, value in self.settings.items() if key not in without]
        texts = [str(value) if key.endswith(".name") else f"{_short(key)} {value}" for key, value in shown]
        return ", ".join(texts) or "all"


def sweep_figure(title: str, cases: Sequence[SweepCase]) -> FigureData:
    """Return the accuracy over what was varied.

    Args:
        title: Name of the sweep.
        cases: At least one, the best first.
    """
    keys = _numeric_keys(cases)
    having = [case for case in cases if all(key in case.settings for key in keys)]
    title = f"Sweep {title}"
    if len(keys) == 1:
        return _lines(title, keys[0], having, [case for case in cases if keys[0] not in case.settings])
    if len(keys) == 2 and _is_grid(keys, having):
        return _maps(title, keys, having)
    return _points(title, keys, having) if keys else _bars(title, cases)


def _numeric_keys(cases: Sequence[SweepCase]) -> list[str]:
    """Return the keys under which every case that has them has a number, with several values."""
    keys = dict.fromkeys(key for case in cases for key in case.settings)
    values = {key: [case.settings[key] for case in cases if key in case.settings] for key in keys}
    return [
        key
        for key, own in values.items()
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in own) and len(set(own)) > 1
    ]


def _lines(title: str, key: str, cases: Sequence[SweepCase], without: Sequence[SweepCase]) -> FigureData:
    """Draw lines over a number, and a level line for each case that does not have it, such as the plain optimizer."""
    points = [SweepPoint(case.name([key]), case.settings[key], case.accuracy, case.images_per_second) for case in cases]
    drawn = sensitivity(key, sorted(points, key=lambda point: point.name))
    ends = [float(end(case.settings[key] for case in cases)) for end in (min, max)]
    panels = [
        replace(panel, marks=[*panel.marks, *(Curve(case.name(), ends, [y, y], style="dashed") for case, y in levels)])
        for panel, levels in zip(
            drawn.panels,
            (
                [(case, case.percent) for case in without],
                [(case, float(np.mean(case.images_per_second))) for case in without],
            ),
            strict=True,
        )
    ]
    return FigureData("sweep", title, panels, drawn.caption)


def _is_grid(keys: Sequence[str], cases: Sequence[SweepCase]) -> bool:
    """Whether every pair of values was run: numbers drawn at random make no map."""
    pairs = {tuple(case.settings[key] for key in keys) for case in cases}
    sides = [len({pair[side] for pair in pairs}) for side in (0, 1)]
    return len(pairs) == sides[0] * sides[1]


def _maps(title: str, keys: Sequence[str], cases: Sequence[SweepCase]) -> FigureData:
    columns, rows = (sorted({case.settings[key] for case in cases}) for key in keys)
    names = list(dict.fromkeys(case.name(keys) for case in cases))
    panels = []
    for name in sorted(names[:MAX_PANELS]):
        own = {tuple(case.settings[key] for key in keys): case.percent for case in cases if case.name(keys) == name}
        values = [[_value(own.get((column, row))) for column in columns] for row in rows]
        shows_values = max(len(columns), len(rows)) <= MAX_CELLS
        labels = [[f"{value:g}" for value in side] for side in (columns, rows)]
        heatmap = Heatmap(values, labels[0], labels[1], ACCURACY, shows_values=shows_values)
        panels.append(Panel(name, keys[0], keys[1], [heatmap]))
    return FigureData("sweep", title, panels, "Means over seeds.")


def _points(title: str, keys: Sequence[str], cases: Sequence[SweepCase]) -> FigureData:
    names = sorted({case.name(keys) for case in cases})
    panels = []
    for key in keys[:MAX_PANELS]:
        marks: list[Curve | Bars | Heatmap] = []
        for name in names:
            own = [case for case in cases if case.name(keys) == name]
            x = [float(case.settings[key]) for case in own]
            marks.append(Curve(name, x, [case.percent for case in own], style="points"))
        scale = spans_decades([case.settings[key] for case in cases])
        panels.append(Panel(f"Accuracy against {key}", key, ACCURACY, marks, x_scale="log" if scale else "linear"))
    return FigureData("sweep", title, panels, "One point for each combination, mean over seeds.")


def _bars(title: str, cases: Sequence[SweepCase]) -> FigureData:
    best = cases[:MAX_BARS]
    deviations = [100 * float(np.std(case.accuracy, ddof=1)) if len(case.accuracy) > 1 else 0.0 for case in best]
    bars = Bars("accuracy", [case.name() for case in best], [case.percent for case in best], deviations)
    caption = SPREAD if len(best) == len(cases) else f"The best {MAX_BARS} of {len(cases)}. {SPREAD}"
    return FigureData("sweep", title, [Panel("Accuracy", "", ACCURACY, [bars])], caption)


def _value(percent: float | None) -> float | None:
    return None if percent is None or np.isnan(percent) else round(percent, 2)


def _short(key: str) -> str:
    return key.rpartition(".")[2]
