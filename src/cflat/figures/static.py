"""Figures for paper: any `FigureData` as SVG, PDF or PNG, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from cflat._errors import ConfigError
from cflat._files import write_atomic
from cflat.figures._scales import (
    MAX_LABELLED_BARS,
    color_limits,
    counts_whole,
    diagonal_ends,
    is_named_beside,
    label_places,
    short,
)
from cflat.figures.model import Bars, Curve, FigureData, Heatmap, Panel
from cflat.figures.palette import (
    DIVERGING,
    GRID,
    INK,
    SEQUENTIAL,
    band_color,
    group_colors,
    group_of,
    is_light,
)

FORMATS = ("svg", "pdf", "png")
PANEL_INCHES = (4.2, 3.3)
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "text.parse_math": False,  # names may hold dollar signs
    "svg.fonttype": "none",
    "svg.hashsalt": "cflat",
    "pdf.fonttype": 42,
}
METADATA: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}
"""Nothing that changes from one drawing to the next."""
LINES = {"line": "-", "line+points": "-", "steps": "-", "dashed": "--", "points": "none"}


def draw(figure: FigureData, colors: Mapping[str, str] | None = None) -> Figure:
    """Draw a figure.

    Args:
        figure: What to draw.
        colors: Colours of groups that several figures share; the others follow the palette.
    """
    chosen = group_colors(figure, colors)
    columns = min(figure.num_columns or 4, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    width, height = PANEL_INCHES
    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(max(width * columns, 5.0), height * rows + 0.7), layout="constrained")
        all_axes = drawn.subplots(rows, columns, squeeze=False).ravel()
        entries: dict[str, Artist | BarContainer] = {}
        for axes, panel in zip(all_axes, figure.panels, strict=False):
            entries = {**_draw_panel(axes, panel, chosen), **entries}
            if len(figure.panels) > 1:
                axes.set_title(panel.title)
        for axes in all_axes[len(figure.panels) :]:
            axes.set_axis_off()
        if len(entries) > 1:
            handles: Any = list(entries.values())  # containers of bars are handles, though no artists
            drawn.legend(handles, list(entries), loc="outside lower center", ncols=min(len(entries), 2 * columns))
        drawn.suptitle(figure.title, fontsize=11)
    return drawn


def save(figure: FigureData, path: str | Path, colors: Mapping[str, str] | None = None) -> Path:
    """Draw a figure into a file whose ending says the format; the same figure always gives the same SVG.

    Raises:
        ConfigError: If the ending is not svg, pdf or png.
        DataError: If the file cannot be written.
    """
    path = Path(path)
    kind = path.suffix.lstrip(".").lower()
    if kind not in FORMATS:
        raise ConfigError(f"Figures are written as {', '.join(FORMATS)}, got {path.name!r}.")
    drawn = draw(figure, colors)
    with mpl.rc_context(STYLE):
        write_atomic(path, lambda file: drawn.savefig(file, format=kind, dpi=150, metadata=METADATA[kind]))
    return path


def _draw_panel(axes: Axes, panel: Panel, colors: Mapping[str, str]) -> dict[str, Artist | BarContainer]:
    """Draw one panel and return its entries of the legend."""
    entries: dict[str, Artist | BarContainer] = {}
    bars = [mark for mark in panel.marks if isinstance(mark, Bars)]
    for mark in panel.marks:
        if isinstance(mark, Curve):
            line = _draw_curve(axes, mark, colors[group_of(mark)])
            if is_named_beside(mark, panel):
                _name_points(axes, mark, label_places(panel))
            else:
                entries.setdefault(mark.name, line)
        elif isinstance(mark, Heatmap):
            _draw_heatmap(axes, mark, color_limits(panel))
    if bars:
        entries |= _draw_bars(axes, bars, colors)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    if not panel.has_data:
        _say_why(axes, panel.empty)
        return {}
    if counts_whole(panel):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if panel.x_scale == "log":
        axes.set_xscale("log")
        _label_in_plain_numbers(axes.xaxis)
    if panel.y_scale == "log":
        axes.set_yscale("log")
        _label_in_plain_numbers(axes.yaxis)
    if panel.diagonal:
        ends = diagonal_ends(panel)
        axes.plot(ends, ends, color=INK, linewidth=0.8, linestyle=":")
    return entries


def _say_why(axes: Axes, reason: str) -> None:
    """Put a sentence in the place of empty axes."""
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    centre: Any = {"transform": axes.transAxes, "ha": "center", "va": "center"}
    axes.text(0.5, 0.5, fill(reason, 38), fontsize=9, style="italic", **centre)


def _label_in_plain_numbers(axis: Axis) -> None:
    """Label a logarithmic axis without formulas, which are off because names may hold dollar signs."""
    axis.set_major_formatter(_PlainLogFormatter())
    axis.set_minor_formatter(_PlainLogFormatter(labelOnlyBase=False, minor_thresholds=(1, 0.4)))


class _PlainLogFormatter(LogFormatter):
    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def _draw_curve(axes: Axes, curve: Curve, color: str) -> Artist:
    is_dotted = "points" in curve.style or len(curve.x) == 1
    (line,) = axes.plot(
        curve.x,
        curve.y,
        color=color,
        linestyle=LINES[curve.style],
        drawstyle="steps-mid" if curve.style == "steps" else "default",
        marker="o" if is_dotted else "none",
        markersize=5 if curve.style == "points" else 4,
        linewidth=1.6,
        label=curve.name,
    )
    if curve.low is not None and curve.high is not None:
        step: Literal["mid"] | None = "mid" if curve.style == "steps" else None
        axes.fill_between(curve.x, curve.low, curve.high, color=band_color(color), linewidth=0, step=step)
    return line


def _name_points(axes: Axes, curve: Curve, places: Mapping[tuple[float, float], tuple[int, int]]) -> None:
    for x, y, text in zip(curve.x, curve.y, curve.labels or [], strict=True):
        across, up = places.get((x, y), (0, 1))
        axes.annotate(
            text,
            (x, y),
            (6 * across, 6 * up),
            textcoords="offset points",
            fontsize=8,
            ha=("right", "center", "left")[across + 1],  # type: ignore[arg-type]
            va=("top", "center", "bottom")[up + 1],  # type: ignore[arg-type]
        )
    axes.margins(x=0.25, y=0.2)


def _draw_bars(axes: Axes, bars: list[Bars], colors: Mapping[str, str]) -> dict[str, Artist | BarContainer]:
    """Draw the marks side by side at each category; a category that a mark does not have stays empty."""
    categories = list(dict.fromkeys(category for mark in bars for category in mark.categories))
    width = 0.8 / len(bars)
    entries: dict[str, Artist | BarContainer] = {}
    for number, mark in enumerate(bars):
        places = np.array([categories.index(category) for category in mark.categories])
        offset = (number - (len(bars) - 1) / 2) * width
        deviations = None if mark.deviations is None else np.nan_to_num(mark.deviations)
        drawn = axes.bar(
            places + offset,
            mark.values,
            width=0.92 * width,
            yerr=deviations,
            color=colors[group_of(mark)],
            label=mark.name,
            error_kw={"elinewidth": 1, "capsize": 3, "ecolor": INK},
        )
        entries[mark.name] = drawn
        if len(bars) * len(categories) <= MAX_LABELLED_BARS:
            axes.bar_label(drawn, fmt=short, padding=2, fontsize=8)
    axes.set_xticks(range(len(categories)), categories)
    if max(map(len, categories), default=0) * len(categories) > 40:
        axes.tick_params("x", rotation=30)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.12)
    return entries


def _draw_heatmap(axes: Axes, heatmap: Heatmap, limits: tuple[float, float] | None) -> None:
    stops = DIVERGING if heatmap.is_diverging else SEQUENTIAL
    colors = LinearSegmentedColormap.from_list("cflat", list(stops))
    values = np.array([[np.nan if v is None else v for v in row] for row in heatmap.values], dtype=float)
    low, high = limits or (0.0, 1.0)
    image = axes.imshow(np.ma.masked_invalid(values), cmap=colors, vmin=low, vmax=high, aspect="auto")
    for labels, set_ticks in ((heatmap.x, axes.set_xticks), (heatmap.y, axes.set_yticks)):
        stride = max(1, len(labels) // 10)
        places = list(range(0, len(labels), stride))
        set_ticks(places, [_label(labels[place]) for place in places])
    axes.grid(visible=False)
    axes.figure.colorbar(image, ax=axes, label=heatmap.label, shrink=0.9)
    if not heatmap.shows_values:
        return
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            shade = colors((value - low) / (high - low))[:3]
            ink = "black" if is_light(shade) else "white"
            axes.text(column, row, short(value), ha="center", va="center", fontsize=8, color=ink)


def _label(value: str | float) -> str:
    return value if isinstance(value, str) else short(value)
