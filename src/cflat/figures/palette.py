"""The colours of all figures, on paper and on screen, light and dark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import cycle

from cflat.figures.figure import Bars, Curve, FigureData, Heatmap

OPTIMIZERS = {
    "none": ("base optimizer", "#4d4d4d", "#b9bec6"),
    "sam": ("SAM", "#0072b2", "#4ba3de"),
    "asam": ("ASAM", "#56b4e9", "#7cc8f2"),
    "gsam": ("GSAM", "#7f3c8d", "#b47cc1"),
    "msam": ("MSAM", "#8c564b", "#c08d82"),
    "vasso": ("VaSSO", "#44608c", "#8fa8d0"),
    "async_sam": ("AsyncSAM", "#a0522d", "#d09a7a"),
    "random_sam": ("Random SAM", "#5f7f3f", "#9cbf78"),
    "looksam": ("LookSAM", "#b8860b", "#e0b040"),
    "friendly_sam": ("Friendly SAM", "#cc79a7", "#dd97bd"),
    "ss_sam": ("SS-SAM", "#3a8a8a", "#63b9b9"),
    "ae_sam": ("AE-SAM", "#7d8c2a", "#aebc58"),
    "gam": ("GAM", "#882255", "#cf6a9b"),
    "c_flat": ("C-Flat", "#d55e00", "#f0803c"),
    "c_flat_plus": ("C-Flat++", "#e69f00", "#f3bd4a"),
    "c_flat_turbo": ("C-Flat Turbo", "#009e73", "#2fbf94"),
    "c_flat_forecast": ("C-Flat Forecast", "#1f2a6b", "#8592e8"),
}
"""How papers write each optimizer, and its colour in every figure, on a light and on a dark page."""
_SHADES = (0.0, 0.45, -0.35, 0.7)
"""Variants of one optimizer: its colour, then mixed with white (above 0) or black; more than these start anew."""

# Each is also the colour of an optimizer: `DARK` has counterparts of those, and not of any colour.
COLORS = ("#4d4d4d", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f3c8d")
"""Told apart by colour-blind readers (after Okabe and Ito); the first, grey, suits the reference."""
INK = "#33373d"
"""Text and axes."""
GRID = "#d9dce1"
SEQUENTIAL = ("#f3f7fb", "#c9dded", "#8dbbdb", "#4a8fc0", "#1d629b", "#0b3a66")
DIVERGING = ("#0b4f82", "#5f9fca", "#f5f5f2", "#e39a68", "#a8480a")

NAMED = {"refreshed": "#009e73", "reused": "#56b4e9", "skipped": "#b8860b", "best trade-offs": INK}
"""Groups that look the same in every figure."""


def _shade(color: str, amount: float) -> str:
    """Mix a colour with white, or with black if the amount is negative.

    >>> _shade("#004080", 0.5), _shade("#004080", -0.5)
    ('#7f9fbf', '#002040')
    """
    end = 255 if amount > 0 else 0
    parts = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{int(part + abs(amount) * (end - part)):02x}" for part in parts)


DARK = {
    # Opposite signs: what fades towards white on a light page fades towards black on a dark one.
    **{_shade(light, s): _shade(dark, -0.6 * s) for _, light, dark in OPTIMIZERS.values() for s in _SHADES},
    INK: "#d5d9df",
    GRID: "#3a414b",
}
"""What a page puts in the place of each colour on a dark background."""


def group_of(mark: Curve | Bars) -> str:
    """Return the name under which a mark gets its colour."""
    return mark.name if mark.group is None else mark.group


def optimizer_of(label: str) -> str | None:
    """Return the optimizer that a label speaks of: its name or title, alone or followed by settings.

    >>> optimizer_of("C-Flat Turbo, rho=0.1"), optimizer_of("+C-Flat, here"), optimizer_of("epoch 3")
    ('c_flat_turbo', 'c_flat', None)
    """
    words = label.lstrip("+ ").lower()
    starts = [start for start in _LABELS if words == start or words.startswith((f"{start} ", f"{start},"))]
    return _LABELS[max(starts, key=len)] if starts else None  # the longest: C-Flat Turbo is no C-Flat


_LABELS = {
    **{title.lower(): name for name, (title, _, _) in OPTIMIZERS.items()},
    **{name: name for name in OPTIMIZERS},
    # What the paper's tables and ours call the base optimizer alone.
    **dict.fromkeys(("plain", "sgd", "qhm", "adam", "adamw", "nadam", "radam", "rmsprop", "adagrad", "muon"), "none"),
    "turbo": "c_flat_turbo",
    "forecast": "c_flat_forecast",
    "reuse only": "c_flat_turbo",
}
"""What a label can begin with."""


def group_colors(figure: FigureData, fixed: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a colour for each group of a figure.

    ``fixed`` and `NAMED` ones keep theirs, optimizers have their own in every figure (their variants shades of it),
    and all others get what is left.
    """
    marks = [mark for panel in figure.panels for mark in panel.marks]
    groups = list(dict.fromkeys(group_of(mark) for mark in marks if isinstance(mark, Curve | Bars)))
    known = {**optimizer_colors(groups), **NAMED, **(fixed or {})}
    taken = {known[group] for group in groups if group in known}
    free = cycle([color for color in COLORS if color not in taken] or COLORS)
    return {group: known[group] if group in known else next(free) for group in groups}


def optimizer_colors(labels: Iterable[str]) -> dict[str, str]:
    """Return the colours of those labels that speak of an optimizer; several of one get shades, in their order."""
    colors: dict[str, str] = {}
    count: Counter[str] = Counter()
    for label in labels:
        name = optimizer_of(label)
        if name is not None and label not in colors:
            colors[label] = _shade(OPTIMIZERS[name][1], _SHADES[count[name] % len(_SHADES)])
            count[name] += 1
    return colors


def band_color(color: str) -> str:
    """Return the transparent version of a colour, for the band around a curve."""
    # Alpha comes last: the page's script looks for six hex digits to find the dark counterpart.
    return f"{color}2b"


def color_stops(heatmap: Heatmap) -> tuple[str, ...]:
    """Return the colours of a heatmap, from the lowest value to the highest."""
    return DIVERGING if heatmap.is_diverging else SEQUENTIAL


def is_light(color: tuple[float, float, float]) -> bool:
    """Whether black text is read better than white on a colour, given as fractions of red, green and blue."""
    red, green, blue = color
    # Luma of ITU-R BT.601.
    return 0.299 * red + 0.587 * green + 0.114 * blue > 0.55
