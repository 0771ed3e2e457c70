"""Figures for paper: any `FigureData` as SVG, PDF or PNG, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, TypeAlias

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from cflat._errors import ConfigError
from cflat._files import write_atomic
from cflat.figures import _scales as scales
from cflat.figures.figure import Bars, Curve, FigureData, Heatmap, Panel
from cflat.figures.palette import GRID, INK, band_color, color_stops, group_colors, group_of, is_light

FORMATS = ("svg", "pdf", "png")
PANEL_INCHES = (4.2, 3.3)
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "text.parse_math": False,  # names may hold dollar signs
    "svg.fonttype": "none",
    "svg.hashsalt": "cflat",  # element ids are random otherwise
    "pdf.fonttype": 42,
}
METADATA: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}
"""Nothing that changes from one drawing to the next."""
Legend: TypeAlias = dict[str, Artist | BarContainer]
LINES = {"line": "-", "line+points": "-", "steps": "-", "dashed": "--", "points": "none"}


def draw(figure: FigureData, colors: Mapping[str, str] | None = None) -> Figure:
    """Draw a figure; ``colors`` are those of groups that several figures share, the others follow the palette."""
    chosen = group_colors(figure, colors)
    columns = min(figure.num_columns or 4, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    width, height = PANEL_INCHES
    with mpl.rc_context(STYLE):
        # Not through pyplot, which keeps every figure alive until it is closed.
        drawn = Figure(figsize=(max(width * columns, 5.0), height * rows + 0.7), layout="constrained")
        all_axes = drawn.subplots(rows, columns, squeeze=False).ravel()
        entries: Legend = {}
        for axes, panel in zip(all_axes, figure.panels, strict=False):
            for name, handle in _draw_panel(axes, panel, chosen, figure).items():
                entries.setdefault(name, handle)
            if len(figure.panels) > 1:
                axes.set_title(panel.title)
        _share_scales(list(all_axes), figure.panels)
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
    # Again: fonttype and hashsalt are read when the file is written, not when the figure is drawn.
    with mpl.rc_context(STYLE):
        write_atomic(path, lambda file: drawn.savefig(file, format=kind, dpi=150, metadata=METADATA[kind]))
    return path


def _share_scales(all_axes: Sequence[Axes], panels: Sequence[Panel]) -> None:
    """Give panels that show the same quantity the same vertical range."""
    for axes, panel in zip(all_axes, panels, strict=False):
        alike = [a for a, p in zip(all_axes, panels, strict=False) if p.has_data and scales.shares_scale(panel, p)]
        if panel.has_data and len(alike) > 1:
            low, high = min(a.get_ylim()[0] for a in alike), max(a.get_ylim()[1] for a in alike)
            axes.set_ylim(low, high)


def _draw_panel(axes: Axes, panel: Panel, colors: Mapping[str, str], figure: FigureData) -> Legend:
    """Draw one panel and return its entries of the legend."""
    entries: Legend = {}
    bars = [mark for mark in panel.marks if isinstance(mark, Bars)]
    for mark in panel.marks:
        if isinstance(mark, Curve):
            line = _draw_curve(axes, mark, colors[group_of(mark)])
            sides = scales.label_sides(mark, panel)
            if sides is None:
                entries.setdefault(mark.name, line)
            else:
                _name_points(axes, mark, sides)
        elif isinstance(mark, Heatmap):
            _draw_heatmap(axes, mark, *scales.color_limits(figure, mark.label))
    if bars:
        entries |= _draw_bars(axes, bars, colors)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    if not panel.has_data:
        axes.set(xticks=[], yticks=[])
        axes.grid(visible=False)
        centre: Any = {"transform": axes.transAxes, "ha": "center", "va": "center"}
        axes.text(0.5, 0.5, fill(panel.empty, 38), fontsize=9, style="italic", **centre)
        return {}
    if scales.counted(panel) is not None:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis, scale in ((axes.xaxis, panel.x_scale), (axes.yaxis, panel.y_scale)):
        if scale == "log":
            # The scale comes first: setting it replaces the formatters.
            axes.set(**{f"{axis.axis_name}scale": "log"})
            axis.set_major_formatter(_PlainLogFormatter())
            axis.set_minor_formatter(_PlainLogFormatter(labelOnlyBase=False, minor_thresholds=(1, 0.4)))
    if panel.diagonal:
        ends = scales.diagonal_ends(panel)
        axes.plot(ends, ends, color=INK, linewidth=0.8, linestyle=":")
    return entries


class _PlainLogFormatter(LogFormatter):
    """Plain numbers instead of formulas, which are off because names may hold dollar signs."""

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
        step: Any = "mid" if curve.style == "steps" else None
        axes.fill_between(curve.x, curve.low, curve.high, color=band_color(color), linewidth=0, step=step)
    return line


def _name_points(axes: Axes, curve: Curve, sides: list[tuple[int, int]]) -> None:
    for x, y, text, (across, up) in zip(curve.x, curve.y, curve.labels or [], sides, strict=True):
        axes.annotate(
            text,
            (x, y),
            (6 * across, 6 * up),
            textcoords="offset points",
            fontsize=8,
            ha=("right", "center", "left")[across + 1],  # type: ignore[arg-type]
            va=("top", "center", "bottom")[up + 1],  # type: ignore[arg-type]
        )
    # Room for the labels; `_scales` counts on it when it chooses their sides.
    axes.margins(x=0.25, y=0.2)


def _draw_bars(axes: Axes, bars: list[Bars], colors: Mapping[str, str]) -> Legend:
    """Draw the marks side by side at each category; a category that a mark does not have stays empty."""
    categories = list(dict.fromkeys(category for mark in bars for category in mark.categories))
    width = 0.8 / len(bars)
    entries: Legend = {}
    for number, mark in enumerate(bars):
        places = np.array([categories.index(category) for category in mark.categories])
        offset = (number - (len(bars) - 1) / 2) * width
        drawn = axes.bar(
            places + offset,
            mark.values,
            width=0.92 * width,
            yerr=None if mark.deviations is None else np.nan_to_num(mark.deviations),
            color=colors[group_of(mark)],
            label=mark.name,
            error_kw={"elinewidth": 1, "capsize": 3, "ecolor": INK},
        )
        entries[mark.name] = drawn
        if len(bars) * len(categories) <= scales.MAX_LABELLED_BARS:
            axes.bar_label(drawn, fmt=scales.short, padding=2, fontsize=8)
    axes.set_xticks(range(len(categories)), categories)
    if max(map(len, categories), default=0) * len(categories) > 40:
        axes.tick_params("x", rotation=30)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.12)
    return entries


def _draw_heatmap(axes: Axes, heatmap: Heatmap, low: float, high: float) -> None:
    colors = LinearSegmentedColormap.from_list("cflat", list(color_stops(heatmap)))
    values = np.array(heatmap.values, dtype=float)  # None becomes NaN
    image = axes.imshow(np.ma.masked_invalid(values), cmap=colors, vmin=low, vmax=high, aspect="auto")
    for labels, set_ticks in ((heatmap.x, axes.set_xticks), (heatmap.y, axes.set_yticks)):
        places = list(range(0, len(labels), max(1, len(labels) // 10)))
        shown = [labels[place] for place in places]
        set_ticks(places, [label if isinstance(label, str) else scales.short(label) for label in shown])
    axes.grid(visible=False)
    axes.figure.colorbar(image, ax=axes, label=heatmap.label, shrink=0.9)
    for (row, column), value in np.ndenumerate(values):
        if heatmap.shows_values and np.isfinite(value):
            shade = colors((value - low) / (high - low))[:3]
            ink = "black" if is_light(shade) else "white"
            axes.text(column, row, scales.short(value), ha="center", va="center", fontsize=8, color=ink)
