"""Figures on screen: what plotly is given."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cflat.figures import Curve, FigureData, Panel
from cflat.figures.interactive import MAX_LEGEND, plot
from cflat.figures.palette import COLORS, DARK, OPTIMIZERS, group_colors
from figures.examples import ALL, BARS, CURVES, HOSTILE, MAPS, POINTS


@pytest.mark.parametrize("figure", ALL, ids=lambda figure: figure.name)
def test_every_figure_is_strict_json_that_plotly_accepts(figure: FigureData) -> None:
    from plotly.graph_objects import Figure

    made = json.loads(json.dumps(plot(figure), allow_nan=False))
    assert len(Figure(made).data) == len(made["data"])  # raises on any unknown or wrong property
    assert made["layout"]["paper_bgcolor"] == "rgba(0,0,0,0)"


@pytest.mark.parametrize("figure", ALL, ids=lambda figure: figure.name)
def test_the_number_of_columns_changes_the_layout_alone(figure: FigureData) -> None:
    wide, narrow = plot(figure), plot(figure, num_columns=1)
    assert wide["data"] == narrow["data"]
    if len(figure.panels) > 1:
        assert narrow["layout"]["height"] > wide["layout"]["height"]


def test_panels_have_axes_of_their_own_that_do_not_overlap() -> None:
    for columns, apart in ((2, "xaxis"), (1, "yaxis")):
        layout = plot(CURVES, num_columns=columns)["layout"]
        first, second = sorted(tuple(layout[f"{apart}{number}"]["domain"]) for number in ("", "2"))
        assert 0 <= first[0] < first[1] < second[0] < second[1] <= 1
    assert (layout["xaxis2"]["type"], layout["yaxis2"]["type"]) == ("log", "log")
    assert [note["text"] for note in layout["annotations"]] == ["<b>left</b>", "<b>right</b>"]
    (line,) = layout["shapes"]
    assert (line["x0"], line["x1"], line["xref"]) == (0.01, 100.0, "x2")


def test_a_name_is_in_the_legend_once_and_switches_all_its_traces() -> None:
    traces = [trace for trace in plot(CURVES)["data"] if trace["name"] == "mean"]
    assert [trace["showlegend"] for trace in traces] == [False, True, False]
    assert {trace["legendgroup"] for trace in traces} == {"mean"}
    band = traces[0]
    assert band["y"] == [3.5, 2.5, 2.0, 1.0, 1.5, 2.5]
    assert band["fillcolor"].startswith(COLORS[0])
    assert traces[1]["y"] == [3.0, 2.0, None]


def test_styles_points_and_bars() -> None:
    _, _, steps, dashed, _ = plot(CURVES)["data"]
    assert (steps["line"]["shape"], dashed["line"]["dash"]) == ("hvh", "dash")
    points = plot(POINTS)
    assert points["layout"]["showlegend"] is False
    assert [trace["text"] for trace in points["data"]] == [["p"], ["q"]]
    bars = plot(BARS)
    assert bars["layout"]["barmode"] == "group"
    assert bars["data"][0]["error_y"]["array"] == [0.1, 0.0]


def test_heatmaps() -> None:
    made = plot(MAPS)
    assert made["data"][0]["z"] == [[1.0, None], [2.0, 3.0]]
    assert "texttemplate" in made["data"][0]
    assert "texttemplate" not in made["data"][1]
    assert (made["layout"]["coloraxis2"]["cmin"], made["layout"]["coloraxis2"]["cmax"]) == (-1.0, 1.0)
    assert made["layout"]["yaxis"]["autorange"] == "reversed"


def test_texts_are_shown_as_they_are() -> None:
    text = json.dumps(plot(HOSTILE))
    assert "<script" not in text
    assert "</script" not in text
    assert "&lt;/script&gt;&lt;!--" in text


def test_a_legend_that_would_hide_the_chart_is_left_out() -> None:
    curves = [Curve(f"curve {number}", [1, 2], [1, 2]) for number in range(MAX_LEGEND + 1)]
    assert plot(FigureData("many", "Many", [Panel("", "", "", [*curves])]))["layout"]["showlegend"] is False
    assert plot(FigureData("few", "Few", [Panel("", "", "", [*curves[:-1]])]))["layout"]["showlegend"] is True


def test_a_colour_that_is_given_away_is_not_used_twice() -> None:
    figure = FigureData("c", "C", [Panel("", "", "", [Curve(name, [1], [1]) for name in ("new", "fixed", "other")])])
    assert group_colors(figure, {"fixed": COLORS[0], "absent": COLORS[1]}) == {
        "new": COLORS[1],
        "fixed": COLORS[0],
        "other": COLORS[2],
    }


def test_neighbours_share_the_label_of_their_axes() -> None:
    layout = plot(CURVES)["layout"]
    assert (layout["yaxis"]["title"]["text"], layout["yaxis2"]["title"]["text"]) == ("loss", "")
    assert plot(CURVES, num_columns=1)["layout"]["yaxis2"]["title"]["text"] == "loss"


def test_every_colour_has_a_dark_counterpart() -> None:
    assert set(COLORS) <= set(DARK)
    assert set(group_colors(CURVES).values()) <= set(DARK)


@given(st.integers(1, 9), st.integers(1, 4))
def test_any_number_of_panels_stays_inside_the_figure(num_panels: int, columns: int) -> None:
    panel = CURVES.panels[0]
    layout = plot(FigureData("grid", "Grid", [panel] * num_panels, num_columns=columns))["layout"]
    for number in range(1, num_panels + 1):
        for axis in "xy":
            low, high = layout[f"{axis}axis{number if number > 1 else ''}"]["domain"]
            assert 0 <= low < high <= 1


@pytest.mark.parametrize(("count", "step"), [(4, 1), (11, 1), (40, None)])
def test_an_axis_that_counts_names_whole_numbers_once(count, step):
    panel = Panel("", "tasks", "y", [Curve("a", list(range(1, count + 1)), [0.5] * count)])
    axis = plot(FigureData("f", "", [panel]))["layout"]["xaxis"]
    assert axis["tickformat"] == "d"
    assert axis.get("dtick") == step


def test_axes_without_data_say_why() -> None:
    empty = Panel("Right", "x", "y", [Curve("a", [], [])], empty="Too few <steps>; take more.")
    layout = plot(FigureData("f", "F", [Panel("Left", "x", "y", [Curve("a", [1.0], [2.0])]), empty]))["layout"]
    texts = [note["text"] for note in layout["annotations"]]
    assert texts == ["<b>Left</b>", "<b>Right</b>", "<i>Too few &lt;steps&gt;; take more.</i>"]
    assert layout["xaxis2"]["showticklabels"] is False
    assert "showticklabels" not in layout["xaxis"]


def test_an_optimizer_has_one_colour_in_all_figures_and_its_variants_shades_of_it() -> None:
    def colors(*names: str) -> dict[str, str]:
        return group_colors(FigureData("f", "F", [Panel("", "x", "y", [Curve(n, [1.0], [1.0]) for n in names])]))

    first = colors("SGD", "C-Flat", "C-Flat Turbo", "epoch 1")
    second = colors("+C-Flat Turbo, here", "C-Flat++", "C-Flat, rho=0.1", "C-Flat, rho=0.2", "AdamW, base.lr=0.1")
    assert first["C-Flat Turbo"] == second["+C-Flat Turbo, here"] == OPTIMIZERS["c_flat_turbo"][1]
    assert first["C-Flat"] == second["C-Flat, rho=0.1"]
    assert len(set(first.values())) == 4
    assert len(set(second.values())) == 5
    assert set(first.values()) | set(second.values()) <= set(DARK)


def test_every_optimizer_has_a_colour_of_its_own() -> None:
    import cflat

    titles = {name: cflat.optim.get_optimizer_spec(name).title for name in cflat.list_optimizers()}
    assert {name: title for name, (title, _, _) in OPTIMIZERS.items()} == titles
    assert len({color for _, color, _ in OPTIMIZERS.values()}) == len(OPTIMIZERS)
