"""Figures of sweeps and of tuning.

A sweep is drawn as lines over one number, colours over two, points over more, and bars where no case has all of them.
Of a search for settings, every trial is a point; accuracy over learning rates is a curve with its plateau.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cflat.figures.figure import Bars, Curve, FigureData, Heatmap, Mark, Panel, is_number
from cflat.figures.runs import SPREAD, SweepPoint, deviation_of, sensitivity, spans_decades

MAX_BARS = 12
MAX_PANELS = 4
MAX_CELLS = 12
"""Rows or columns of a heat map whose cells still hold a number each."""
ACCURACY = "average accuracy (%)"
VALIDATION = "validation accuracy (%)"
ENDED = "ended early"
SEARCH_COLORS = {ENDED: "#b9bec6"}
"""Pale: what ended early is measured on fewer tasks than the others."""
LABELS = {"base.lr": "learning rate", "optimizer.rho": "radius"}


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
        texts = [f"{value}" if key.endswith(".name") else f"{key.rpartition('.')[2]} {value}" for key, value in shown]
        return ", ".join(texts) or "all"


def sweep_figure(title: str, cases: Sequence[SweepCase]) -> FigureData:
    """Return the accuracy over what was varied, of at least one case, the best first."""
    settings = [case.settings for case in cases]
    keys = [key for key in numeric_keys(settings) if len({own[key] for own in settings if key in own}) > 1]
    having = [case for case in cases if all(key in case.settings for key in keys)]
    title = f"Sweep {title}"
    if len(keys) == 1:
        return _lines(title, keys[0], having, [case for case in cases if keys[0] not in case.settings])
    if len(keys) == 2 and having and _is_grid(keys, having):
        return _maps(title, keys, having)
    # Without numbers, or with numbers that no case has together, such as settings of different optimizers.
    return _points(title, keys, having) if keys and having else _bars(title, cases)


def numeric_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys under which all settings that have them have a number."""
    keys = dict.fromkeys(key for own in settings for key in own)
    return [key for key in keys if all(is_number(own[key]) for own in settings if key in own)]


def _lines(title: str, key: str, cases: Sequence[SweepCase], without: Sequence[SweepCase]) -> FigureData:
    """Draw lines over a number, and a level line for each case that does not have it, such as the plain optimizer."""
    points = [SweepPoint(case.name([key]), case.settings[key], case.accuracy, case.images_per_second) for case in cases]
    drawn = sensitivity(key, sorted(points, key=lambda point: point.name))
    ends = [float(end(case.settings[key] for case in cases)) for end in (min, max)]
    speeds = [float(np.mean(case.images_per_second)) for case in without]
    panels = []
    # `sensitivity` returns accuracy first, then speed.
    for panel, levels in zip(drawn.panels, ([case.percent for case in without], speeds), strict=True):
        lines = (Curve(c.name(), ends, [y, y], style="dashed") for c, y in zip(without, levels, strict=True))
        panels.append(replace(panel, marks=[*panel.marks, *lines]))
    return FigureData("sweep", title, panels, drawn.caption)


def _is_grid(keys: Sequence[str], cases: Sequence[SweepCase]) -> bool:
    """Whether every pair of values was run: numbers drawn at random make no map."""
    pairs = {tuple(case.settings[key] for key in keys) for case in cases}
    sides = [len({pair[side] for pair in pairs}) for side in (0, 1)]
    return len(pairs) == sides[0] * sides[1]


def _maps(title: str, keys: Sequence[str], cases: Sequence[SweepCase]) -> FigureData:
    columns, rows = (sorted({case.settings[key] for case in cases}) for key in keys)
    x, y = ([f"{value:g}" for value in side] for side in (columns, rows))
    shows_values = max(len(columns), len(rows)) <= MAX_CELLS
    names = list(dict.fromkeys(case.name(keys) for case in cases))  # the best first
    panels = []
    for name in sorted(names[:MAX_PANELS]):
        own = {tuple(case.settings[key] for key in keys): case.percent for case in cases if case.name(keys) == name}
        percents = [[own.get((column, row), np.nan) for column in columns] for row in rows]
        values = [[None if np.isnan(percent) else round(percent, 2) for percent in row] for row in percents]
        panels.append(Panel(name, keys[0], keys[1], [Heatmap(values, x, y, ACCURACY, shows_values=shows_values)]))
    return FigureData("sweep", title, panels, "Means over seeds.")


def _points(title: str, keys: Sequence[str], cases: Sequence[SweepCase]) -> FigureData:
    names = sorted({case.name(keys) for case in cases})
    panels = []
    for key in keys[:MAX_PANELS]:
        marks = []
        for name in names:
            own = [case for case in cases if case.name(keys) == name]
            x = [float(case.settings[key]) for case in own]
            marks.append(Curve(name, x, [case.percent for case in own], style="points"))
        scale = spans_decades([case.settings[key] for case in cases])
        panels.append(Panel(f"Accuracy against {key}", key, ACCURACY, marks, x_scale="log" if scale else "linear"))
    return FigureData("sweep", title, panels, "One point for each combination, mean over seeds.")


def _bars(title: str, cases: Sequence[SweepCase]) -> FigureData:
    best = cases[:MAX_BARS]
    deviations = [100 * deviation_of(case.accuracy) for case in best]
    bars = Bars("accuracy", [case.name() for case in best], [case.percent for case in best], deviations)
    caption = SPREAD if len(best) == len(cases) else f"The best {MAX_BARS} of {len(cases)}. {SPREAD}"
    return FigureData("sweep", title, [Panel("Accuracy", "", ACCURACY, [bars])], caption)


@dataclass(frozen=True)
class TrialPoint:
    """Settings that were tried."""

    name: str
    """The optimizer."""
    settings: Mapping[str, Any]
    accuracy: float
    is_complete: bool
    is_best: bool


def search_figure(title: str, trials: Sequence[TrialPoint]) -> FigureData:
    """Return validation accuracy over each number that was searched, with a line down from each chosen trial."""
    keys = numeric_keys([trial.settings for trial in trials])
    panels = [_search_panel(key, [trial for trial in trials if key in trial.settings]) for key in keys]
    caption = (
        "One point for each completed trial; dashed lines mark what was chosen. Trials that were ended early stand on "
        "the bottom line: their accuracy is over fewer tasks. No test image was looked at."
    )
    return FigureData("search", title, panels, caption)


def rate_figure(
    title: str, points: Sequence[SweepPoint], plateaus: Mapping[str, tuple[float, float, float]], name: str
) -> FigureData:
    """Return validation accuracy over learning rates: a curve for each optimizer, and its plateau as a level line.

    Plateaus are, by optimizer, the lowest and highest good rate and the accuracy that makes a rate good, as a fraction;
    ``name`` is their entry in the legend.
    """
    levels = [
        Curve(name, [low, high], [100 * level] * 2, style="dashed", group=group)
        for group, (low, high, level) in plateaus.items()
    ]
    # The accuracy panel alone: points of a learning-rate curve carry no speeds.
    marks: list[Mark] = [*sensitivity("base.lr", points).panels[0].marks, *levels]
    panel = Panel(title, LABELS["base.lr"], VALIDATION, marks, x_scale="log")
    return FigureData("rates", title, [panel], f"{SPREAD} No test image was looked at.")


def _search_panel(key: str, trials: Sequence[TrialPoint]) -> Panel:
    marks = []
    # Trials that ended early stand on this line, below all others.
    floor = 100 * min((trial.accuracy for trial in trials if trial.is_complete), default=0.0) - 1
    for name in dict.fromkeys(trial.name for trial in trials):
        own = [trial for trial in trials if trial.name == name and trial.is_complete]
        x = [float(trial.settings[key]) for trial in own]
        marks.append(Curve(name, x, [100 * trial.accuracy for trial in own], style="points"))
        for best in (trial for trial in own if trial.is_best):
            place, top = float(best.settings[key]), 100 * best.accuracy
            marks.append(Curve("chosen", [place, place], [floor, top], style="dashed", group=name))
    ended = [trial for trial in trials if not trial.is_complete]
    if ended:  # at their own accuracy, over fewer and easier tasks, they would stand above the chosen one
        x = [float(trial.settings[key]) for trial in ended]
        marks.append(Curve(ENDED, x, [floor] * len(ended), style="points"))
    values = [float(trial.settings[key]) for trial in trials]
    is_log = min(values) > 0 and max(values) / min(values) > 5  # two draws may lie close together
    label = LABELS.get(key, key)
    return Panel(label.capitalize(), label, VALIDATION, marks, x_scale="log" if is_log else "linear")
