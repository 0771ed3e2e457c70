"""The colours of all figures, on paper and on screen, light and dark."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle

from cflat.figures.model import Bars, Curve, FigureData

__all__ = [
    "COLORS",
    "DARK",
    "DIVERGING",
    "GRID",
    "INK",
    "NAMED",
    "SEQUENTIAL",
    "band_color",
    "group_colors",
    "group_of",
    "is_light",
]

COLORS = ("#4d4d4d", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f3c8d")
"""Told apart by colour-blind readers (after Okabe and Ito); the first, grey, suits the plain reference."""
INK = "#33373d"
"""Text and axes."""
GRID = "#d9dce1"
SEQUENTIAL = ("#f3f7fb", "#c9dded", "#8dbbdb", "#4a8fc0", "#1d629b", "#0b3a66")
DIVERGING = ("#0b4f82", "#5f9fca", "#f5f5f2", "#e39a68", "#a8480a")

NAMED = {"refreshed": "#009e73", "reused": "#56b4e9", "skipped": "#b8860b", "best trade-offs": INK}
"""Groups that look the same in every figure."""

DARK = {
    "#4d4d4d": "#b9bec6",
    "#0072b2": "#4ba3de",
    "#d55e00": "#f0803c",
    "#009e73": "#2fbf94",
    "#cc79a7": "#dd97bd",
    "#b8860b": "#e0b040",
    "#56b4e9": "#7cc8f2",
    "#7f3c8d": "#b47cc1",
    INK: "#d5d9df",
    GRID: "#3a414b",
}
"""What a page puts in the place of each colour on a dark background."""

_BAND_ALPHA = "2b"


def group_of(mark: Curve | Bars) -> str:
    """Return the name under which a mark gets its colour."""
    return mark.name if mark.group is None else mark.group


def group_colors(figure: FigureData, fixed: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a colour for each group of a figure; ``fixed`` and `NAMED` ones keep theirs, and no other gets it."""
    marks = [mark for panel in figure.panels for mark in panel.marks]
    groups = list(dict.fromkeys(group_of(mark) for mark in marks if isinstance(mark, Curve | Bars)))
    known = {**NAMED, **(fixed or {})}
    taken = {known[group] for group in groups if group in known}
    free = cycle([color for color in COLORS if color not in taken] or COLORS)
    return {group: known[group] if group in known else next(free) for group in groups}


def band_color(color: str) -> str:
    """Return the transparent version of a colour, for the band around a curve."""
    return color + _BAND_ALPHA


def is_light(color: tuple[float, float, float]) -> bool:
    """Whether black text is read better than white on a colour, given as fractions of red, green and blue."""
    red, green, blue = color
    return 0.299 * red + 0.587 * green + 0.114 * blue > 0.55
