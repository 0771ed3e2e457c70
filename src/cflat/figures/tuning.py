"""Figures of tuning: what a search tried, and accuracy over a grid of learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cflat.figures.model import Curve, FigureData, Mark, Panel
from cflat.figures.runs import SPREAD, SweepPoint, sensitivity
from cflat.figures.sweeps import numeric_keys

ACCURACY = "validation accuracy (%)"
ENDED = "ended early"
SEARCH_COLORS = {ENDED: "#b9bec6"}
"""Pale: what ended early is measured on fewer tasks than the others."""
LABELS = {"base.lr": "learning rate", "optimizer.rho": "radius"}


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
    panels = [_panel(key, [trial for trial in trials if key in trial.settings]) for key in keys]
    caption = (
        "One point for each trial, at the accuracy over the tasks that it came to. Dashed lines mark what was chosen; "
        "no test image was looked at."
    )
    return FigureData("search", title, panels, caption)


def rate_figure(
    title: str, points: Sequence[SweepPoint], plateaus: Mapping[str, tuple[float, float, float]], name: str
) -> FigureData:
    """Return validation accuracy over learning rates: a curve for each optimizer, and its plateau as a level line.

    Args:
        title: What was trained on what.
        points: One for each optimizer and rate.
        plateaus: By optimizer: lowest and highest good rate, and the accuracy that makes a rate good; a fraction.
        name: What a plateau is.
    """
    levels = [
        Curve(name, [low, high], [100 * level] * 2, style="dashed", group=group)
        for group, (low, high, level) in plateaus.items()
    ]
    marks: list[Mark] = [*sensitivity("base.lr", points).panels[0].marks, *levels]
    panel = Panel(title, LABELS["base.lr"], ACCURACY, marks, x_scale="log")
    return FigureData("rates", title, [panel], f"{SPREAD} No test image was looked at.")


def _panel(key: str, trials: Sequence[TrialPoint]) -> Panel:
    marks = []
    floor = 100 * min(trial.accuracy for trial in trials)
    for name in dict.fromkeys(trial.name for trial in trials):
        own = [trial for trial in trials if trial.name == name and trial.is_complete]
        marks.append(_points(name, key, own))
        for best in (trial for trial in own if trial.is_best):
            place, top = float(best.settings[key]), 100 * best.accuracy
            marks.append(Curve("chosen", [place, place], [floor, top], style="dashed", group=name))
    ended = [trial for trial in trials if not trial.is_complete]
    marks += [_points(ENDED, key, ended)] if ended else []
    values = [float(trial.settings[key]) for trial in trials]
    is_log = min(values) > 0 and max(values) / min(values) > 5
    label = LABELS.get(key, key)
    return Panel(label.capitalize(), label, ACCURACY, marks, x_scale="log" if is_log else "linear")


def _points(name: str, key: str, trials: Sequence[TrialPoint]) -> Curve:
    x = [float(trial.settings[key]) for trial in trials]
    return Curve(name, x, [100 * trial.accuracy for trial in trials], style="points")
