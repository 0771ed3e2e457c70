"""Figures of the loss around the weights: slices, planes, spectra, and the lines between tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from cflat.figures.model import Curve, FigureData, Heatmap, Panel, downsampled

Points: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""The x and y of a curve."""
Surface: TypeAlias = tuple[Sequence[float], Sequence[float], Sequence[Sequence[float]]]
"""The x and y of a grid, and one row of values for each y."""

DENSITY_FLOOR = 1e-5
"""Lowest density that is drawn, relative to the peak: a logarithmic axis has no zero."""


def slice_figure(slices: Mapping[str, Points], *, name: str = "slices", is_log: bool = False) -> FigureData:
    """Show the loss along a direction, one curve for each entry.

    Args:
        slices: Distances and losses by name, for instance by optimizer.
        name: Name of the figure's files.
        is_log: Whether the losses are drawn on a logarithmic axis.
    """
    panel = Panel(
        title="",
        x_label="distance along the direction",
        y_label="loss",
        marks=[_curve(label, points) for label, points in slices.items()],
        y_scale="log" if is_log else "linear",
    )
    return FigureData(
        name=name,
        title="Loss along a direction",
        panels=[panel],
        caption="The loss at the weights plus a multiple of a direction; 0 is where training ended." + _gaps(slices),
    )


def plane_figure(planes: Mapping[str, Surface], *, name: str = "planes", is_log: bool = True) -> FigureData:
    """Show the loss over a plane, one panel for each entry.

    Args:
        planes: Distances along both directions and rows of losses by name.
        name: Name of the figure's files.
        is_log: Whether colours show the logarithm (base 10) of the loss, which keeps the floor of a valley visible.
    """
    panels = [_surface_panel(label, surface, is_log) for label, surface in planes.items()]
    return FigureData(
        name=name,
        title="Loss over a plane",
        panels=panels,
        caption="The loss at the weights plus multiples of two directions; (0, 0) is where training ended. "
        "Every panel has colours of its own.",
    )


def spectrum_figure(
    spectra: Mapping[str, Points],
    *,
    name: str = "spectra",
    top: Mapping[str, Sequence[float]] | None = None,
) -> FigureData:
    """Show the density of the Hessian's eigenvalues on a logarithmic axis.

    Args:
        spectra: Grid and density by name.
        name: Name of the figure's files.
        top: Eigenvalues that are known one by one, by the same names; drawn as points at the foot of the figure.
    """
    marks = [_floored(label, points) for label, points in spectra.items()]
    foot = min((min(mark.y) for mark in marks), default=1.0)
    dots = [
        Curve(f"{label}, largest", [float(v) for v in values], [foot] * len(values), style="points", group=label)
        for label, values in (top or {}).items()
    ]
    return FigureData(
        name=name,
        title="Spectrum of the Hessian",
        panels=[Panel("", "eigenvalue", "density", [*marks, *dots], y_scale="log")],
        caption=f"Estimated density of eigenvalues; below {DENSITY_FLOOR:g} of the peak it is drawn at that level.",
        meta={"top": {label: [float(v) for v in values] for label, values in (top or {}).items()}},
    )


def connectivity_figure(
    connections: Mapping[str, Points],
    *,
    name: str = "connectivity",
    barriers: Mapping[str, float] | None = None,
) -> FigureData:
    """Show the loss on straight lines between the weights after different tasks, one line for each pair.

    Args:
        connections: Fractions of the way and losses by pair, such as "task 1 to task 2".
        name: Name of the figure's files.
        barriers: Heights of the barriers by the same names; added to the legend.
    """
    heights = {pair: float(height) for pair, height in (barriers or {}).items()}
    labels = {pair: f"{pair} (barrier {heights[pair]:.3g})" if pair in heights else pair for pair in connections}
    panel = Panel(
        title="",
        x_label="fraction of the way",
        y_label="loss",
        marks=[replace(_curve(labels[pair], points), style="line+points") for pair, points in connections.items()],
    )
    return FigureData(
        name=name,
        title="Loss between the minima of tasks",
        panels=[panel],
        caption="The loss on the straight line between two sets of weights." + _gaps(connections),
        meta={"barriers": heights},
    )


def _curve(name: str, points: Points) -> Curve:
    """Return the finite points of a curve."""
    pairs = [(x, y) for x, y in zip(*points, strict=True) if math.isfinite(y)]
    x, y = downsampled([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    return Curve(name, x, y)


def _floored(name: str, points: Points) -> Curve:
    """Return a density whose values are at least the floor, relative to its peak."""
    curve = _curve(name, points)
    floor = DENSITY_FLOOR * max(curve.y)
    return replace(curve, y=[max(value, floor) for value in curve.y])


def _surface_panel(title: str, surface: Surface, is_log: bool) -> Panel:
    xs, ys, rows = surface
    # Rows of a heatmap run from top to bottom, distances from bottom to top.
    values = [[_level(value, is_log) for value in row] for row in reversed(rows)]
    heatmap = Heatmap(
        values, [float(x) for x in xs], [float(y) for y in reversed(ys)], "log10 of the loss" if is_log else "loss"
    )
    return Panel(title, "distance along the first direction", "distance along the second direction", [heatmap])


def _level(value: float, is_log: bool) -> float | None:
    """Return the value to draw, or None where there is none: Inf, NaN, or no logarithm."""
    if not math.isfinite(value) or (is_log and value <= 0):
        return None
    return math.log10(value) if is_log else float(value)


def _gaps(curves: Mapping[str, Points]) -> str:
    """Say how many points are missing because their loss is not a number."""
    num_missing = sum(not math.isfinite(value) for _, losses in curves.values() for value in losses)
    return f" Left out: {num_missing} points where the loss is not finite." if num_missing else ""
