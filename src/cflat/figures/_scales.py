"""Ranges that follow from the marks of a panel, the same on paper and on screen."""

from __future__ import annotations

from math import isfinite

from cflat.figures.model import Bars, Curve, Panel

__all__ = ["MAX_LABELLED_BARS", "color_limits", "counts_whole", "diagonal_ends", "is_named_beside", "short"]

MAX_LABELLED_BARS = 12
"""More bars than this show no numbers."""
MAX_LABELLED_POINTS = 15


def short(value: float) -> str:
    """Return a number with three digits, never in powers of ten where people would not.

    >>> short(0.1234), short(98.62), short(1394.2)
    ('0.123', '98.6', '1394')
    """
    return f"{value:.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"


def is_named_beside(mark: Curve, panel: Panel) -> bool:
    """Whether the labels of a mark stand beside its points, so that it needs no entry in the legend."""
    num_points = sum(len(other.x) for other in panel.marks if isinstance(other, Curve) and other.style == "points")
    return mark.labels is not None and mark.style == "points" and num_points <= MAX_LABELLED_POINTS


def counts_whole(panel: Panel) -> bool:
    """Whether the horizontal axis counts something, such as tasks, and so needs whole numbers alone."""
    values = [x for mark in panel.marks if isinstance(mark, Curve) for x in mark.x]
    return bool(values) and panel.x_scale == "linear" and all(float(x).is_integer() for x in values)


def diagonal_ends(panel: Panel) -> tuple[float, float]:
    """Return where the line y = x begins and ends so that it passes all curves; 0 and 1 without any point."""
    curves = [mark for mark in panel.marks if isinstance(mark, Curve)]
    values = [value for curve in curves for value in (*curve.x, *curve.y) if isfinite(value)]
    if "log" in (panel.x_scale, panel.y_scale):
        values = [value for value in values if value > 0]
    return (min(values), max(values)) if values else (0.0, 1.0)


def color_limits(panel: Panel) -> tuple[float, float] | None:
    """Return the values of the first and last colour over all heatmaps of a panel; None if there is no value."""
    maps = [mark for mark in panel.marks if not isinstance(mark, Curve | Bars)]
    values = [value for mark in maps for row in mark.values for value in row if value is not None and isfinite(value)]
    if not values:
        return None
    if any(mark.is_diverging for mark in maps):
        reach = max(abs(value) for value in values) or 1.0
        return -reach, reach
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
