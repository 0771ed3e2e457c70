"""A figure as data: panels of marks with labels. Print and screen draw the same thing from it.

Functions that make figures return `FigureData`; `cflat.figures.static` draws it with matplotlib (SVG, PDF, PNG) and
`cflat.figures.interactive` with plotly. Arrays are lists of plain numbers, so a figure is also a JSON file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

MAX_POINTS = 2000
"""Longer curves are thinned out before they are stored or drawn."""


@dataclass(frozen=True)
class Curve:
    """Points in the plane, joined or not, with an optional band around them."""

    name: str
    x: list[float]
    y: list[float]
    low: list[float] | None = None
    """Lower edge of the band; None draws none."""
    high: list[float] | None = None
    style: Literal["line", "points", "steps", "dashed", "line+points"] = "line"
    group: str | None = None
    """Curves of one group share a colour, in all panels; None makes a group of its name."""
    labels: list[str] | None = None
    """A text for each point, shown on hover and, for single points, beside them."""
    kind: Literal["curve"] = "curve"


@dataclass(frozen=True)
class Bars:
    """One bar per category, with an optional deviation."""

    name: str
    categories: list[str]
    values: list[float]
    deviations: list[float] | None = None
    group: str | None = None
    kind: Literal["bars"] = "bars"


@dataclass(frozen=True)
class Heatmap:
    """A matrix as colours; rows from top to bottom, None where there is no value."""

    values: list[list[float | None]]
    x: list[str] | list[float]
    y: list[str] | list[float]
    label: str
    """What the colour means."""
    is_diverging: bool = False
    """Whether zero is the middle of the colours."""
    shows_values: bool = False
    kind: Literal["heatmap"] = "heatmap"


Mark: TypeAlias = Curve | Bars | Heatmap


@dataclass(frozen=True)
class Panel:
    """One set of axes."""

    title: str
    x_label: str
    y_label: str
    marks: Sequence[Mark]
    x_scale: Literal["linear", "log"] = "linear"
    y_scale: Literal["linear", "log"] = "linear"
    diagonal: bool = False
    """Whether to draw the line y = x."""
    empty: str = "There is no data for this panel."
    """Text for a panel in which no mark has a value."""

    @property
    def has_data(self) -> bool:
        """Whether there is anything to draw."""
        return any(math.isfinite(value) for mark in self.marks for value in _values(mark))


@dataclass(frozen=True)
class FigureData:
    """A figure: a name for its files, a title, panels side by side, and a sentence on what is shown."""

    name: str
    title: str
    panels: list[Panel]
    caption: str = ""
    num_columns: int | None = None
    """Panels in a row; None puts up to four."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Numbers that belong to the figure but are not drawn; plain JSON values."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FigureData:
        """Read what `to_dict` returned."""
        # asdict() drops the classes of the marks; ``kind`` stands for them.
        kinds: dict[str, type[Mark]] = {"curve": Curve, "bars": Bars, "heatmap": Heatmap}
        panels = [
            Panel(**{**panel, "marks": [kinds[mark["kind"]](**mark) for mark in panel["marks"]]})
            for panel in values["panels"]
        ]
        return cls(**{**values, "panels": panels})


def _values(mark: Mark) -> list[float]:
    if isinstance(mark, Heatmap):
        return [value for row in mark.values for value in row if value is not None]
    return mark.y if isinstance(mark, Curve) else mark.values


def is_number(value: Any) -> bool:
    """Whether a setting can be drawn along an axis; Booleans, which Python counts as integers, cannot."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def curve_through(name: str, points: Iterable[tuple[float, float | None]], **look: Any) -> Curve:
    """Return a curve through those points that have a finite value; ``look`` are further fields of `Curve`."""
    known = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    return Curve(name, *downsampled([x for x, _ in known], [y for _, y in known]), **look)


def downsampled(x: Sequence[float], y: Sequence[float], limit: int = MAX_POINTS) -> tuple[list[float], list[float]]:
    """Return at most ``limit`` points of a curve that keep its peaks: the extremes of equal stretches."""
    if len(x) <= limit:
        return [float(v) for v in x], [float(v) for v in y]
    values = np.asarray(y, dtype=float)
    kept = {0, len(values) - 1}  # the curve must not become shorter
    # Two points of each stretch: a mean would hide the one step at which a loss has exploded.
    for stretch in np.array_split(np.arange(len(values)), (limit - 2) // 2):
        part = np.where(np.isnan(values[stretch]), -np.inf, values[stretch])
        kept.add(int(stretch[np.argmax(part)]))
        # NaN became -inf for the maximum, and must not win the minimum.
        kept.add(int(stretch[np.argmin(np.where(np.isinf(part), np.inf, part))]))
    chosen = sorted(kept)
    return [float(x[i]) for i in chosen], [float(values[i]) for i in chosen]
