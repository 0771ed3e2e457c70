"""Figures of the front: differences over cost, and accuracy away from the tuned settings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from front_streams import ROWS, STREAMS
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from cflat.figures.palette import OPTIMIZERS

LINEAR = 10
"""Points of difference up to which the figures have a linear scale."""
AWAY = {"rate x": "learning rate / tuned", "radius x": "radius / tuned", "batch ": "batch size"}
"""Conditions that begin like this, and the axis on which they lie."""
SHOWN = ("none", "c_flat", "turbo")
"""Rows that are compared away from their tuned settings."""
FEWEST = 3
"""Seeds that a row needs for that."""


def draw_front(values: Mapping[str, Any], path: Path) -> None:
    """Draw differences of Avg to plain and to C-Flat over evaluations per step and over relative time."""
    rows = values["rows"]
    costs = {
        "evaluations per step": {name: statistics.mean(row["evaluations_per_step"]) for name, row in rows.items()},
        "time of a step relative to plain": {
            name: 1 / row["relative_speed"] for name, row in rows.items() if row["relative_speed"]
        },
    }
    costs = {label: by_row for label, by_row in costs.items() if len(by_row) > 1}
    references = [name for name in ("none", "c_flat") if name in rows]
    figure = Figure(figsize=(6 * len(costs), 0.6 + 3.8 * len(references)), dpi=110, layout="constrained")
    figure.suptitle(f"{values['title']}:\ndifference of Avg in points, 95 % paired intervals", fontsize=10)
    panels = figure.subplots(len(references), len(costs), sharex="col", squeeze=False)
    named: list[tuple[Any, list[tuple[float, float, str, str]]]] = []
    for line, reference in enumerate(references):
        for column, (label, by_row) in enumerate(costs.items()):
            axes = panels[line][column]
            axes.axhline(0, color="#999999", linewidth=0.8)
            points = []
            for name, x in by_row.items():
                mean, half = (0.0, 0.0) if name == reference else rows[name]["differences"][reference]["avg"]
                color = OPTIMIZERS[ROWS[name].optimizer["name"]][1]
                axes.errorbar(x, mean, yerr=0 if math.isnan(half) else half, fmt="o", color=color, capsize=2)
                points.append((x, mean, rows[name]["title"], color))
            axes.margins(x=0.2)
            if min(point[1] for point in points) < -LINEAR:
                axes.set_yscale("symlog", linthresh=LINEAR)  # what collapses must not squeeze the rest together
                low, high = axes.get_ylim()
                axes.set_yticks([tick for tick in (-60, -40, -20, -10, -5, 0, 5, 10, 20) if low <= tick <= high])
                axes.yaxis.set_major_formatter("{x:g}")
            axes.set_ylabel(f"to {ROWS[reference].title}")
            if reference == references[-1]:
                axes.set_xlabel(label)
            named.append((axes, points))
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # names have to fit into the panels, not the panels around the names
    for axes, points in named:
        _name_points(axes, points)
    figure.savefig(path)  # as it was drawn: names are placed by the pixel


def comparable_rows(streams: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return by stream what was run away from the tuned settings, where rows can be compared."""
    found = {}
    for stream, values in streams.items():
        rows = values.get("robustness", {})
        compared = {name: rows[name] for name in SHOWN if name in rows and len(rows[name]["tuned"]["avg"]) >= FEWEST}
        if len(compared) > 1:
            found[stream] = compared
    return found


def draw_robustness(found: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw accuracy over rates, radii and batches away from the tuned ones, a column for each stream."""
    figure = Figure(figsize=(2 + 2.6 * len(found), 7.6), dpi=110, layout="constrained")
    panels = figure.subplots(len(AWAY), len(found), sharey="col", squeeze=False)
    for column, (stream, rows) in enumerate(found.items()):
        panels[0][column].set_title(stream, fontsize=10)
        for line, (kind, label) in enumerate(AWAY.items()):
            axes = panels[line][column]
            axes.set_xscale("log", base=2)
            for name, row in rows.items():
                points = robustness_curve(row, kind, STREAMS[stream].layer["train"]["batch_size"])
                color = OPTIMIZERS[ROWS[name].optimizer["name"]][1]
                axes.plot(*zip(*points, strict=True), "o-", color=color, label=ROWS[name].title, markersize=4)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.grid(alpha=0.3)
            axes.set_xlabel(label)
            if column == 0:
                axes.set_ylabel("Avg (%)")
    entries = {label: line for axes in panels[0] for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    names = [ROWS[name].title for name in SHOWN if ROWS[name].title in entries]
    figure.legend([entries[name] for name in names], names, loc="outside upper center", ncols=len(SHOWN), frameon=False)
    figure.savefig(path)


def robustness_curve(row: Mapping[str, Any], kind: str, batch_size: int) -> list[tuple[float, float]]:
    """Return the mean Avg in percent of a row under all conditions of a kind, and tuned, in the order of the axis."""
    tuned = batch_size if kind == "batch " else 1
    points = {float(name.removeprefix(kind)): runs for name, runs in row.items() if name.startswith(kind)}
    points[tuned] = row["tuned"]
    return [(x, 100 * statistics.mean(points[x]["avg"])) for x in sorted(points)]


def _name_points(axes: Any, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Write names near their points, each at the nearest place inside the panel that is still free."""
    panel = axes.get_window_extent()
    taken: list[Any] = [Bbox.from_bounds(*(axes.transData.transform((x, y)) - 4), 8, 8) for x, y, _, _ in points]
    places = sorted(
        ((right, up) for up in range(-150, 151, 9) for right in range(-120, 121, 6) if abs(right) > 4 or abs(up) > 8),
        key=lambda place: math.hypot(place[0], 2 * place[1]),
    )
    for x, y, text, color in sorted(points, key=lambda point: -point[1]):
        note = axes.annotate(text, (x, y), (0, 0), textcoords="offset points", fontsize=7, color=color, va="center")
        for place in places:
            note.set_position(place)
            note.set_horizontalalignment("left" if place[0] > 0 else "right")
            box = note.get_window_extent()
            is_inside = panel.x0 < box.x0 and box.x1 < panel.x1 and panel.y0 < box.y0 and box.y1 < panel.y1
            if is_inside and not any(box.overlaps(other) for other in taken):
                break
        if math.hypot(*note.get_position()) > 20:
            line = {"arrowstyle": "-", "color": color, "linewidth": 0.5, "alpha": 0.6}
            axes.annotate("", (x, y), note.get_position(), textcoords="offset points", arrowprops=line)
        taken.append(box)
