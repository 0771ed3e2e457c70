"""Figures of the loss around the weights: slices, planes, spectra, and the lines between tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from cflat.figures.figure import Curve, FigureData, Heatmap, Panel, curve_through

Points: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""The x and y of a curve."""
Surface: TypeAlias = tuple[Sequence[float], Sequence[float], Sequence[Sequence[float]]]
"""The x and y of a grid, and one row of values for each y."""

DENSITY_FLOOR = 1e-5
"""Lowest density that is drawn, relative to the peak: a logarithmic axis has no zero."""


def slice_figure(slices: Mapping[str, Points]) -> FigureData:
    """Show the loss along a direction: distances and losses by name, for instance by optimizer."""
    marks = [curve_through(label, zip(*points, strict=True)) for label, points in slices.items()]
    caption = "The loss at the weights plus a multiple of a direction; 0 is where training ended." + _gaps(slices)
    panel = Panel("", "distance along the direction", "loss", marks)
    return FigureData("slices", "Loss along a direction", [panel], caption)


def plane_figure(planes: Mapping[str, Surface]) -> FigureData:
    """Show the logarithm of the loss over a plane, one panel for each name; it keeps the floor of a valley visible."""
    panels = []
    for label, (xs, ys, rows) in planes.items():
        # Rows of a heatmap run from top to bottom, distances from bottom to top.
        values = [[math.log10(v) if math.isfinite(v) and v > 0 else None for v in row] for row in reversed(rows)]
        heatmap = Heatmap(values, [float(x) for x in xs], [float(y) for y in reversed(ys)], "log10 of the loss")
        axes = ("distance along the first direction", "distance along the second direction")
        panels.append(Panel(label, *axes, [heatmap]))
    caption = (
        "The loss at the weights plus multiples of two directions; (0, 0) is where training ended. "
        "All panels share one scale of colours."
    )
    return FigureData("planes", "Loss over a plane", panels, caption)


def spectrum_figure(spectra: Mapping[str, Points], *, top: Mapping[str, Sequence[float]] | None = None) -> FigureData:
    """Show the density of the Hessian's eigenvalues on a logarithmic axis: grid and density by name.

    ``top`` are eigenvalues that are known one by one, by the same names; drawn as points at the foot of the figure.
    """
    marks = []
    for label, points in spectra.items():
        curve = curve_through(label, zip(*points, strict=True))
        floor = DENSITY_FLOOR * max(curve.y)  # zero has no place on a logarithmic axis
        marks.append(replace(curve, y=[max(value, floor) for value in curve.y]))
    foot = min((min(mark.y) for mark in marks), default=1.0)
    known = {label: [float(value) for value in values] for label, values in (top or {}).items()}
    marks += [
        Curve(f"{label}, largest", values, [foot] * len(values), style="points", group=label)
        for label, values in known.items()
    ]
    caption = f"Estimated density of eigenvalues; below {DENSITY_FLOOR:g} of the peak it is drawn at that level."
    panel = Panel("", "eigenvalue", "density", marks, y_scale="log")
    return FigureData("spectra", "Spectrum of the Hessian", [panel], caption, meta={"top": known})


def connectivity_figure(
    connections: Mapping[str, Points], *, barriers: Mapping[str, float] | None = None
) -> FigureData:
    """Show the loss on straight lines between weights: fractions of the way and losses by pair, "task 1 to task 2".

    Heights of barriers, by the same names, are added to the legend.
    """
    heights = {pair: float(height) for pair, height in (barriers or {}).items()}
    labels = {pair: f"{pair} (barrier {heights[pair]:.3g})" if pair in heights else pair for pair in connections}
    marks = [
        curve_through(labels[pair], zip(*points, strict=True), style="line+points")
        for pair, points in connections.items()
    ]
    caption = "The loss on the straight line between two sets of weights." + _gaps(connections)
    panel = Panel("", "fraction of the way", "loss", marks)
    return FigureData("connectivity", "Loss between the minima of tasks", [panel], caption, meta={"barriers": heights})


def _gaps(curves: Mapping[str, Points]) -> str:
    """Return a sentence on points that are missing because their loss is not finite; empty if none are."""
    num_missing = sum(not math.isfinite(value) for _, losses in curves.values() for value in losses)
    return f" Left out: {num_missing} points where the loss is not finite." if num_missing else ""
