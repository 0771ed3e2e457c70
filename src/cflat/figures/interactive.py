"""Figures for the screen: any `FigureData` as the JSON of a plotly chart, without a title.

Colours are those of a light page; a page that turns dark replaces them by `cflat.figures.palette.DARK`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from textwrap import wrap
from typing import Any

from cflat.figures import _scales as scales
from cflat.figures.figure import Bars, Curve, FigureData, Heatmap, Panel
from cflat.figures.palette import GRID, INK, band_color, color_stops, group_colors, group_of

PANEL_PIXELS = 300
LEGEND_ROW_PIXELS = 22
MAX_LEGEND = 14
"""With more entries the legend would hide the chart; the names are then shown on hover only."""
TOP, BETWEEN, BOTTOM = 34, 96, 52
"""Pixels above the first panels (their titles), between rows (labels and titles), and under the last."""
COLUMN_GAPS = 0.2
"""Fraction of the width between columns, all gaps together; of two columns, at most half of it."""
COLOR_BAR_GAP = 0.04
MODES = {"line": "lines", "dashed": "lines", "steps": "lines", "points": "markers", "line+points": "lines+markers"}
LINES = {"dashed": {"dash": "dash"}, "steps": {"shape": "hvh"}}

MAX_TICKS = 10
"""An axis that counts up to this many things names each of them."""


def plot(figure: FigureData, colors: Mapping[str, str] | None = None, num_columns: int | None = None) -> dict[str, Any]:
    """Return ``{"data": [...], "layout": {...}}`` for plotly, panels as subplots.

    ``colors`` are those of groups that several figures share; the others follow the palette. ``num_columns`` replaces
    the figure's own; 1 suits a narrow screen. Only the layout depends on it.
    """
    chosen = group_colors(figure, colors)
    columns = min(num_columns or figure.num_columns or 4, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    entries = _legend_names(figure)
    shows_legend = 1 < len(entries) <= MAX_LEGEND
    # Estimated from the letters: only the browser knows how wide they are.
    legend_rows = -(-sum(len(name) + 7 for name in entries) // (100 if columns > 1 else 42)) if shows_legend else 0
    plot_pixels = rows * PANEL_PIXELS + (rows - 1) * BETWEEN
    bottom = BOTTOM + legend_rows * LEGEND_ROW_PIXELS
    layout: dict[str, Any] = {
        "height": plot_pixels + TOP + bottom,
        "margin": {"l": 62, "r": 18, "t": TOP, "b": bottom},
        # Transparent: the page behind the chart may be light or dark.
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": INK, "size": 13, "family": "system-ui, sans-serif"},
        "hovermode": "closest",
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": GRID, "activecolor": INK},
        "barmode": "group",
        "showlegend": shows_legend,
        "legend": {"orientation": "h", "x": 0, "y": -(BOTTOM - 2) / plot_pixels, "yanchor": "top", "tracegroupgap": 0},
        "annotations": [],
    }
    data: list[dict[str, Any]] = []
    seen: set[str] = set()
    for index, panel in enumerate(figure.panels):
        place = _place(index, columns, rows, plot_pixels)
        axis = "" if index == 0 else str(index + 1)  # plotly's names: x, x2, x3
        data += _traces(panel, chosen, axis, seen)
        layout |= _axes(panel, axis, place, figure)
        # The panel itself ends the search where no earlier one shares its scale.
        like = next(i for i, other in enumerate(figure.panels) if other is panel or scales.shares_scale(panel, other))
        if like < index:
            layout[f"yaxis{axis}"]["matches"] = "y" if like == 0 else f"y{like + 1}"
        if index % columns and figure.panels[index - 1].y_label == panel.y_label:
            layout[f"yaxis{axis}"]["title"] = {"text": ""}  # the neighbour to the left has it
        (left, right), (low, high) = place
        if len(figure.panels) > 1:
            title = _words(f"<b>{_safe(panel.title)}</b>", left, high, xanchor="left", yanchor="bottom", yshift=6)
            layout["annotations"].append(title)
        if not panel.has_data:
            text = f"<i>{'<br>'.join(_safe(line) for line in wrap(panel.empty, 42))}</i>"
            centre = ((left + right) / 2, (low + high) / 2)
            layout["annotations"].append(_words(text, *centre, xanchor="center", yanchor="middle"))
        elif panel.diagonal:
            layout.setdefault("shapes", []).append(_diagonal(panel, axis))
    return {"data": data, "layout": layout}


Place = tuple[tuple[float, float], tuple[float, float]]


def _place(index: int, columns: int, rows: int, pixels: int) -> Place:
    """Return the horizontal and vertical stretch of a panel, as fractions of the plotting area."""
    row, column = divmod(index, columns)
    gap = min(COLUMN_GAPS / 2, COLUMN_GAPS / max(columns - 1, 1))
    width = (1 - gap * (columns - 1)) / columns
    left = column * (width + gap)
    top = 1 - row * (PANEL_PIXELS + BETWEEN) / pixels
    # Rounding must not leave the area: plotly rejects a stretch beyond 0 or 1.
    return (left, min(1.0, left + width)), (max(0.0, top - PANEL_PIXELS / pixels), top)


def _axes(panel: Panel, axis: str, place: Place, figure: FigureData) -> dict[str, Any]:
    heatmap = next((mark for mark in panel.marks if isinstance(mark, Heatmap)), None)
    shared = {
        "gridcolor": GRID,
        "linecolor": GRID,
        "zeroline": False,
        "exponentformat": "power",
        "automargin": True,
        "showgrid": heatmap is None,
    }
    across: dict[str, Any] = {**shared, "domain": list(place[0]), "anchor": f"y{axis}", "type": panel.x_scale}
    up: dict[str, Any] = {**shared, "domain": list(place[1]), "anchor": f"x{axis}", "type": panel.y_scale}
    across["title"] = {"text": _safe(panel.x_label), "standoff": 8, "font": {"size": 13}}
    up["title"] = {"text": _safe(panel.y_label), "standoff": 8, "font": {"size": 13}}
    if not panel.has_data:
        across["showticklabels"] = up["showticklabels"] = across["showgrid"] = up["showgrid"] = False
    reach = scales.counted(panel)
    if reach is not None:
        across["tickformat"] = "d"
        # Without a distance of 1, ticks at halves would be labelled as whole numbers.
        across |= {"dtick": 1} if reach <= MAX_TICKS else {"nticks": 8}
    if any(isinstance(mark, Bars) for mark in panel.marks):
        across["type"] = "category"
        up["rangemode"] = "tozero"
    axes = {f"xaxis{axis}": across, f"yaxis{axis}": up}
    if heatmap is not None:
        # A name such as "5" must not be placed at the number 5.
        for own, labels in ((across, heatmap.x), (up, heatmap.y)):
            own["type"] = "category" if any(isinstance(label, str) for label in labels) else "linear"
        up["autorange"] = "reversed"  # plotly counts rows from below
        across["domain"][1] -= COLOR_BAR_GAP
        axes[f"coloraxis{axis}"] = _color_axis(heatmap, figure, across["domain"][1], place[1])
    return axes


def _words(text: str, x: float, y: float, **anchor: Any) -> dict[str, Any]:
    font = {"size": 13, "color": INK}
    return {"text": text, "x": x, "y": y, "xref": "paper", "yref": "paper", "showarrow": False, "font": font, **anchor}


def _diagonal(panel: Panel, axis: str) -> dict[str, Any]:
    low, high = scales.diagonal_ends(panel)
    line = {"color": INK, "width": 1, "dash": "dot"}
    ends = {"x0": low, "y0": low, "x1": high, "y1": high}
    return {"type": "line", "xref": f"x{axis}", "yref": f"y{axis}", "line": line, **ends}


def _traces(panel: Panel, colors: Mapping[str, str], axis: str, seen: set[str]) -> list[dict[str, Any]]:
    """Return the traces of a panel; a name that is in the legend already is not entered again."""
    traces: list[dict[str, Any]] = []
    num_bars = sum(len(mark.values) for mark in panel.marks if isinstance(mark, Bars))
    for mark in panel.marks:
        on = {"xaxis": f"x{axis}", "yaxis": f"y{axis}"}
        if isinstance(mark, Heatmap):
            traces.append({**_heatmap(mark), **on, "coloraxis": f"coloraxis{axis}"})
            continue
        color = colors[group_of(mark)]
        named = {**on, "name": _safe(mark.name), "legendgroup": _safe(mark.name), "showlegend": mark.name not in seen}
        seen.add(mark.name)
        if isinstance(mark, Bars):
            traces.append({**_bars(mark, color, num_bars <= scales.MAX_LABELLED_BARS), **named})
        else:
            sides = scales.label_sides(mark, panel)
            if sides is not None:
                named["showlegend"] = False
            *band, line = _curve(mark, color, sides)
            traces += [*({**trace, **named, "showlegend": False} for trace in band), {**line, **named}]
    return traces


def _curve(curve: Curve, color: str, sides: list[tuple[int, int]] | None) -> list[dict[str, Any]]:
    main: dict[str, Any] = {
        "type": "scatter",
        "mode": MODES[curve.style] if len(curve.x) > 1 else "markers",
        "x": _numbers(curve.x),
        "y": _numbers(curve.y),
        "line": {"color": color, "width": 2, **LINES.get(curve.style, {})},
        "marker": {"color": color, "size": 9 if curve.style == "points" else 6},
        "hovertemplate": "%{x:.5~g}, %{y:.5~g}",
    }
    if curve.labels is not None:
        main["text"] = [_safe(text) for text in curve.labels]
        main["hovertemplate"] = "%{text}<br>%{x:.5~g}, %{y:.5~g}<extra></extra>"
        if sides is not None:
            words = [f"{('bottom', 'middle', 'top')[y + 1]} {('left', 'center', 'right')[x + 1]}" for x, y in sides]
            # Labels at the edge of a panel reach over its axes, where plotly would clip them.
            main |= {"mode": "markers+text", "textposition": words, "cliponaxis": False}
    if curve.low is None or curve.high is None:
        return [main]
    band = {  # one outline, forth along the upper edge and back along the lower
        "type": "scatter",
        "mode": "lines",
        "x": _numbers([*curve.x, *reversed(curve.x)]),
        "y": _numbers([*curve.high, *reversed(curve.low)]),
        "fill": "toself",
        "fillcolor": band_color(color),
        "line": {"width": 0, "color": color},
        "hoverinfo": "skip",
    }
    return [band, main]


def _bars(bars: Bars, color: str, shows_values: bool) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "type": "bar",
        "x": [_safe(category) for category in bars.categories],
        "y": _numbers(bars.values),
        "marker": {"color": color},
        "hovertemplate": "%{x}: %{y:.5~g}",
    }
    if bars.deviations is not None:
        deviations = [value or 0.0 for value in _numbers(bars.deviations)]  # a single seed has none
        trace["error_y"] = {"type": "data", "array": deviations, "color": INK, "thickness": 1}
    if shows_values:
        texts = ["" if value is None else scales.short(value) for value in trace["y"]]
        # Without a fixed angle plotly rotates numbers that are wider than their bar.
        trace |= {"text": texts, "textposition": "inside", "insidetextanchor": "start", "textangle": 0}
    return trace


def _heatmap(heatmap: Heatmap) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": [_numbers(row) for row in heatmap.values],
        "x": [_safe(label) if isinstance(label, str) else label for label in heatmap.x],
        "y": [_safe(label) if isinstance(label, str) else label for label in heatmap.y],
        "hoverongaps": False,  # a gap has no value to show
        "hovertemplate": f"%{{y}}, %{{x}}: %{{z:.5~g}} {_safe(heatmap.label)}<extra></extra>",
        "xgap": 1,
        "ygap": 1,
    }
    if heatmap.shows_values:
        trace["texttemplate"] = "%{z:.3~r}"
    return trace


def _color_axis(heatmap: Heatmap, figure: FigureData, x: float, stretch: tuple[float, float]) -> dict[str, Any]:
    stops = color_stops(heatmap)
    low, high = scales.color_limits(figure, heatmap.label)
    return {
        "colorscale": [[index / (len(stops) - 1), color] for index, color in enumerate(stops)],
        "cmin": low,
        "cmax": high,
        "colorbar": {
            "title": {"text": _safe(heatmap.label), "side": "right", "font": {"size": 13}},
            "x": x,
            "y": sum(stretch) / 2,
            "len": stretch[1] - stretch[0],
            "thickness": 10,
            "outlinewidth": 0,
        },
    }


def _legend_names(figure: FigureData) -> list[str]:
    marks = [(mark, panel) for panel in figure.panels for mark in panel.marks if not isinstance(mark, Heatmap)]
    return list(dict.fromkeys(mark.name for mark, panel in marks if scales.label_sides(mark, panel) is None))


def _numbers(values: Sequence[float | None]) -> list[float | None]:
    """Return numbers that JSON can hold, with the digits that a screen can show."""
    return [None if v is None or not math.isfinite(v) else float(f"{v:.6g}") for v in values]


def _safe(text: str) -> str:
    """Return a text that plotly shows as it is: it reads a few tags and entities in labels."""
    return escape(text, quote=False)
