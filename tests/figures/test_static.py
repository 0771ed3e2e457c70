"""Figures on paper: every mark is drawn, alike each time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from cflat import ConfigError, DataError
from cflat.figures import Curve, FigureData, Panel
from cflat.figures.palette import COLORS
from cflat.figures.static import FORMATS, draw, save
from figures.examples import ALL, BARS, CURVES, MAPS, POINTS


@pytest.mark.parametrize("figure", ALL, ids=lambda figure: figure.name)
@pytest.mark.parametrize("kind", FORMATS)
def test_every_figure_is_written_in_every_format(figure: FigureData, kind: str, tmp_path: Path) -> None:
    path = save(figure, tmp_path / f"figure.{kind}")
    start = {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}[kind]
    assert path.read_bytes().startswith(start)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("kind", ["svg", "pdf"])
def test_the_same_figure_gives_the_same_file(kind: str, tmp_path: Path) -> None:
    first, second = (save(MAPS, tmp_path / f"{name}.{kind}").read_bytes() for name in ("a", "b"))
    assert first == second


def test_another_ending_or_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="svg, pdf, png"):
        save(CURVES, tmp_path / "figure.gif")
    with pytest.raises(DataError, match="could not be written"):
        save(CURVES, tmp_path / "absent" / "figure.svg")


def test_curves_keep_their_numbers_style_and_band() -> None:
    axes = draw(CURVES).axes[0]
    mean, steps, dashed = axes.lines
    assert mean.get_xydata()[:2].tolist() == [[1, 3], [2, 2]]
    assert (mean.get_marker(), steps.get_drawstyle(), dashed.get_linestyle()) == ("o", "steps-mid", "--")
    (band,) = axes.collections
    edges = band.get_paths()[0].vertices[:, 1]
    assert (edges.min(), edges.max()) == (1.0, 3.5)


def test_a_group_has_one_colour_in_all_panels_and_one_entry_in_the_legend() -> None:
    drawn = draw(CURVES)
    left, right = drawn.axes
    assert left.lines[0].get_color() == right.lines[0].get_color() == COLORS[0]
    (legend,) = drawn.legends
    assert [text.get_text() for text in legend.get_texts()] == ["mean", "steps", "dashed"]


def test_the_legend_lists_names_in_the_order_of_the_panels() -> None:
    panels = [Panel(title, "x", "", [Curve(name, [1, 2], [1, 2]) for name in title]) for title in ("ab", "bc")]
    (legend,) = draw(FigureData("f", "F", panels)).legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "c"]


def test_given_colours_are_used() -> None:
    assert draw(CURVES, {"a": "#123456"}).axes[0].lines[0].get_color() == "#123456"


def test_one_entry_or_named_points_need_no_legend() -> None:
    single = FigureData("one", "One", [Panel("", "", "", [Curve("only", [1, 2], [1, 2])])])
    assert draw(single).legends == []
    points = draw(POINTS)
    assert points.legends == []
    assert [text.get_text() for text in points.axes[0].texts] == ["p", "q"]


def test_scales_and_diagonal() -> None:
    right = draw(CURVES).axes[1]
    assert (right.get_xscale(), right.get_yscale()) == ("log", "log")
    diagonal = right.lines[-1]
    assert np.array_equal(diagonal.get_xdata(), diagonal.get_ydata())
    assert (min(diagonal.get_xdata()), max(diagonal.get_xdata())) == (0.01, 100.0)


def test_bars_stand_side_by_side_at_their_categories() -> None:
    axes = draw(BARS).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["k = 1", "k = 5", "k = 10"]
    one, two = ([bar.get_x() + bar.get_width() / 2 for bar in bars] for bars in axes.containers if len(bars) == 2)
    assert one == pytest.approx([-0.2, 0.8])
    assert two == pytest.approx([1.2, 2.2])


def test_heatmaps_mask_what_is_missing_and_centre_signed_values() -> None:
    plain, signed, *_ = draw(MAPS).axes
    (image,) = plain.images
    assert image.get_array().mask.tolist() == [[False, True], [False, False]]
    assert [text.get_text() for text in plain.texts] == ["1", "2", "3"]
    assert signed.images[0].get_clim() == (-1.0, 1.0)
    middle = to_hex(signed.images[0].cmap(0.5))
    assert all(int(middle[i : i + 2], 16) > 235 for i in (1, 3, 5))
    assert not signed.texts


def test_logarithmic_axes_are_labelled_in_plain_numbers():
    panel = Panel("", "x", "y", [Curve("a", [0.01, 0.1, 0.5], [1e-5, 1e-2, 3.0])], x_scale="log", y_scale="log")
    drawn = draw(FigureData("log", "", [panel]))
    drawn.canvas.draw()
    axes = drawn.axes[0]
    labels = [label.get_text() for axis in (axes.xaxis, axes.yaxis) for label in axis.get_ticklabels(which="both")]
    shown = [label for label in labels if label]
    assert "0.01" in shown
    assert "1e-05" in shown
    assert all(float(label) > 0 for label in shown)  # no formula, which would be printed as text


def test_axes_without_data_say_why() -> None:
    empty = Panel(
        "Right", "x", "y", [Curve("a", [], [])], "log", "log", diagonal=True, empty="Too few steps; take more."
    )
    figure = FigureData("f", "F", [Panel("Left", "x", "y", [Curve("a", [1.0], [2.0])]), empty])
    left, right = draw(figure).axes
    assert [text.get_text() for text in right.texts] == ["Too few steps; take more."]
    assert not left.texts
    assert len(right.get_xticks()) == 0


def test_labels_of_two_marks_at_one_point_stand_apart() -> None:
    marks = [Curve(name, [x], [1.0], style="points", labels=[name]) for name, x in (("a", 1.0), ("b", 1.0), ("c", 2.0))]
    drawn = draw(FigureData("f", "F", [Panel("", "x", "y", [*marks])]))
    FigureCanvasAgg(drawn).draw()
    first, second, _ = (text.get_window_extent() for text in drawn.axes[0].texts)
    assert not first.overlaps(second)


def test_labels_cover_neither_points_nor_each_other() -> None:
    names = ["plain", "SAM", "C-Flat", "C-Flat Turbo, rho=0.1", "C-Flat Turbo"]
    places = [(100.0, 50.0), (50.0, 50.1), (51.0, 50.2), (98.0, 50.05), (99.0, 50.15)]
    marks = [Curve(name, [x], [y], style="points", labels=[name]) for name, (x, y) in zip(names, places, strict=True)]
    drawn = draw(FigureData("f", "F", [Panel("", "x", "y", [*marks])]))
    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    (axes,) = drawn.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 5
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[index + 1 :]), names[index]
        assert not any(box.contains(*axes.transData.transform(point)) for point in places), names[index]
