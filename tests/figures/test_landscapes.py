"""The figures hold the numbers that went in, in the order in which they are drawn, and survive JSON."""

from __future__ import annotations

import json
import math

import pytest

from cflat.figures.figure import MAX_POINTS, FigureData
from cflat.figures.landscapes import (
    DENSITY_FLOOR,
    connectivity_figure,
    plane_figure,
    slice_figure,
    spectrum_figure,
)
from cflat.figures.static import draw


def all_figures() -> list[FigureData]:
    inf, nan = math.inf, math.nan
    return [
        slice_figure({"plain": ([-1, 0, 1], [2, 1, inf]), "C-Flat": ([-1, 0, 1], [1.5, 1, 1.4])}),
        plane_figure({"plain": ([0, 1], [0, 1, 2], [[1, 10], [nan, 0], [0.1, inf]])}),
        spectrum_figure({"plain": ([0, 1, 2], [0.0, 1.0, 0.5])}, top={"plain": [2.0, 1.5]}),
        connectivity_figure({"task 1 to task 2": ([0, 0.5, 1], [0, 2, 1])}, barriers={"task 1 to task 2": 1.5}),
    ]


@pytest.mark.parametrize("figure", all_figures(), ids=lambda figure: figure.name)
def test_figures_are_strict_json(figure):
    text = json.dumps(figure.to_dict(), allow_nan=False)
    assert FigureData.from_dict(json.loads(text)) == figure
    assert figure.caption
    assert all(panel.x_label and panel.y_label for panel in figure.panels)


def test_a_slice_leaves_out_what_cannot_be_drawn_and_says_so():
    figure = all_figures()[0]
    plain, flat = figure.panels[0].marks
    assert (plain.name, plain.x, plain.y) == ("plain", [-1, 0], [2, 1])
    assert flat.y == [1.5, 1, 1.4]
    assert "Left out: 1 points" in figure.caption
    assert "Left out" not in slice_figure({"a": ([0], [1.0])}).caption


def test_long_curves_are_thinned():
    x = [float(i) for i in range(10 * MAX_POINTS)]
    assert len(slice_figure({"a": (x, x)}).panels[0].marks[0].x) <= MAX_POINTS


def test_a_plane_is_drawn_from_top_to_bottom():
    heatmap = all_figures()[1].panels[0].marks[0]
    assert heatmap.y == [2, 1, 0]
    assert heatmap.x == [0, 1]
    assert heatmap.values == [[-1.0, None], [None, None], [0.0, 1.0]]


def test_planes_share_the_colours_that_their_caption_promises():
    planes = {"low": ([0, 1], [0, 1], [[1.0, 10.0]] * 2), "high": ([0, 1], [0, 1], [[100.0, 1000.0]] * 2)}
    figure = plane_figure(planes)
    limits = [axes.images[0].get_clim() for axes in draw(figure).axes if axes.images]
    assert limits == [(0.0, 3.0), (0.0, 3.0)]
    assert "All panels share one scale of colours." in figure.caption


def test_a_spectrum_has_a_floor_and_its_top_values_beside_it():
    panel = all_figures()[2].panels[0]
    curve, dots = panel.marks
    assert panel.y_scale == "log"
    assert curve.y == [DENSITY_FLOOR, 1.0, 0.5]
    assert (dots.x, dots.y) == ([2.0, 1.5], [DENSITY_FLOOR] * 2)
    assert (dots.group, dots.style) == (curve.name, "points")


def test_connections_carry_their_barriers():
    figure = all_figures()[3]
    curve = figure.panels[0].marks[0]
    assert curve.name == "task 1 to task 2 (barrier 1.5)"
    assert curve.y == [0, 2, 1]
    assert curve.style == "line+points"
    assert figure.meta == {"barriers": {"task 1 to task 2": 1.5}}
    assert connectivity_figure({"a": ([0, 1], [1, 2])}).panels[0].marks[0].name == "a"
