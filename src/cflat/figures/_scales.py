"""Ranges that follow from the marks of a panel, the same on paper and on screen."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

from cflat.figures.figure import Curve, FigureData, Heatmap, Mark, Panel

MAX_LABELLED_BARS = 12
"""More bars than this show no numbers."""
MAX_LABELLED_POINTS = 15


def short(value: float) -> str:
    """Return a number with three digits, never in powers of ten where people would not.

    >>> short(0.1234), short(98.62), short(1394.2)
    ('0.123', '98.6', '1394')
    """
    return f"{value:.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"


def label_sides(mark: Mark, panel: Panel) -> list[tuple[int, int]] | None:
    """Return on which side of each point of a mark its label stands: where it covers other labels and points least.

    A side is (-1, 0 or 1 from left to right, -1, 0 or 1 from below to above). Sizes are those of a usual panel. None
    means that there are no labels beside the points of this mark, and it needs an entry in the legend.
    """
    dots = [other for other in panel.marks if isinstance(other, Curve) and other.style == "points"]
    is_crowded = sum(len(other.x) for other in dots) > MAX_LABELLED_POINTS  # no side is free among so many
    if not isinstance(mark, Curve) or mark.style != "points" or mark.labels is None or is_crowded:
        return None
    # The key of a point is its mark and place there: two marks may have points at the same coordinates.
    points = {
        (number, place): point
        for number, dot in enumerate(dots)
        if dot.labels
        for place, point in enumerate(zip(dot.x, dot.y, dot.labels, strict=True))
        if isfinite(point[0]) and isfinite(point[1])
    }
    across, up = _unit([x for x, _, _ in points.values()]), _unit([y for _, y, _ in points.values()])
    taken = [_box(across(x), up(y), _POINT, _POINT) for x, y, _ in points.values()]
    places: dict[tuple[int, int], tuple[int, int]] = {}
    # From top to bottom, each label avoiding those before it: greedy, and good enough for so few points.
    for key, (x, y, text) in sorted(points.items(), key=lambda item: -item[1][1]):
        width, height = len(text) * _LETTER[0], _LETTER[1]
        away = (width / 2 + _POINT, height / 2 + _POINT)
        boxes = {side: _box(across(x) + side[0] * away[0], up(y) + side[1] * away[1], width, height) for side in _SIDES}
        side = min(_SIDES, key=lambda side: _badness(boxes[side], taken))
        places[key] = side
        taken.append(boxes[side])
    # Points that are not finite were given no place.
    own = next(number for number, dot in enumerate(dots) if dot is mark)
    return [places.get((own, place), (0, 1)) for place in range(len(mark.x))]


_SIDES = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1))
"""Where a text can stand, the nicest first."""
_LETTER, _POINT = (0.019, 0.055), 0.02
"""Width and height of a letter, and the size of a point, as fractions of the range of the points."""
Box = tuple[float, float, float, float]


def _unit(values: list[float]) -> Callable[[float], float]:
    """Return the map from a value to its fraction of the range of all of them."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    return lambda value: (value - low) / (high - low) if high > low else 0.5


def _box(x: float, y: float, width: float, height: float) -> Box:
    return x - width / 2, x + width / 2, y - height / 2, y + height / 2


def _badness(box: Box, taken: list[Box]) -> float:
    """Return how much of a text covers others or lies outside of the panel, which has a margin around its points."""
    # A little less than the margin that `static` leaves to the left and right of named points.
    beyond = max(0.0, -0.2 - box[0]) + max(0.0, box[1] - 1.2)
    covered = (
        max(0.0, min(box[1], other[1]) - max(box[0], other[0]))
        * max(0.0, min(box[3], other[3]) - max(box[2], other[2]))
        for other in taken
    )
    # As an area, like the overlaps: a strip of the height of a letter.
    return sum(covered) + _LETTER[1] * beyond


def shares_scale(panel: Panel, other: Panel) -> bool:
    """Whether two panels show the same quantity upwards and must have comparable heights."""
    if not panel.y_label or any(isinstance(mark, Heatmap) for mark in (*panel.marks, *other.marks)):
        return False  # bars without a label name their quantity below: evaluations beside images per second
    return (panel.y_label, panel.y_scale) == (other.y_label, other.y_scale)


def counted(panel: Panel) -> float | None:
    """Return how far the horizontal axis reaches if it counts something, such as tasks, in whole numbers alone."""
    values = [x for mark in panel.marks if isinstance(mark, Curve) for x in mark.x]
    is_count = values and panel.x_scale == "linear" and all(float(x).is_integer() for x in values)
    return max(values) - min(values) if is_count else None


def diagonal_ends(panel: Panel) -> tuple[float, float]:
    """Return where the line y = x begins and ends to pass all curves; 0 and 1 without any point."""
    curves = [mark for mark in panel.marks if isinstance(mark, Curve)]
    values = [value for curve in curves for value in (*curve.x, *curve.y) if isfinite(value)]
    if "log" in (panel.x_scale, panel.y_scale):
        values = [value for value in values if value > 0]
    return (min(values), max(values)) if values else (0.0, 1.0)


def color_limits(figure: FigureData, label: str) -> tuple[float, float]:
    """Return the values of the first and last colour of all heatmaps that show the same quantity in a figure.

    0 and 1 if there is no value.
    """
    marks = [mark for panel in figure.panels for mark in panel.marks]
    maps = [mark for mark in marks if isinstance(mark, Heatmap) and mark.label == label]
    values = [value for mark in maps for row in mark.values for value in row if value is not None and isfinite(value)]
    if not values:
        return 0.0, 1.0
    if any(mark.is_diverging for mark in maps):  # zero must have the middle colour
        reach = max(abs(value) for value in values) or 1.0
        return -reach, reach
    low, high = min(values), max(values)
    # Equal values still need a range: the shade of a cell is its fraction of it.
    return (low, high) if high > low else (low - 0.5, high + 0.5)
