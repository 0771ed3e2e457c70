"""The picture of a sweep suits what was varied, and both drawers can draw it."""

from __future__ import annotations

from itertools import product

import pytest

from cflat.figures._scales import color_limits
from cflat.figures.figure import Bars, Curve, FigureData, Heatmap, Panel
from cflat.figures.interactive import plot
from cflat.figures.static import draw
from cflat.figures.sweeps import SweepCase, TrialPoint, search_figure, sweep_figure


def case(accuracy: float = 0.5, **settings: object) -> SweepCase:
    return SweepCase({key.replace("__", "."): value for key, value in settings.items()}, [accuracy, accuracy], [9, 11])


def drawn(cases: list[SweepCase]) -> FigureData:
    figure = sweep_figure("test", cases)
    draw(figure)
    plot(figure)
    assert FigureData.from_dict(figure.to_dict()) == figure
    return figure


def test_one_number_gives_a_line_for_each_name() -> None:
    cases = [case(rho / 10, optimizer__name=name, optimizer__rho=rho) for name in ("sam", "gam") for rho in (3, 1, 2)]
    figure = drawn([*cases, case(0.9, optimizer__name="none")])
    curves = [mark for mark in figure.panels[0].marks if isinstance(mark, Curve)]
    assert [curve.name for curve in curves] == ["gam", "sam", "none"]
    assert [curve.x for curve in curves] == [[1, 2, 3], [1, 2, 3], [1, 3]]
    assert curves[0].y == pytest.approx([10, 20, 30])
    assert (curves[2].y, curves[2].style) == ([90, 90], "dashed")  # it has no radius: a level to compare with
    assert figure.panels[1].marks[2].y == [10, 10]


def test_two_numbers_give_a_map_for_each_name() -> None:
    grid = product(("sam", "gam"), (0.1, 0.2, 0.3), (5, 10))
    figure = drawn([case(rho * k / 10, optimizer__name=name, a__rho=rho, a__k=k) for name, rho, k in grid])
    assert [panel.title for panel in figure.panels] == ["gam", "sam"]
    (heatmap,) = figure.panels[0].marks
    assert isinstance(heatmap, Heatmap)
    assert (heatmap.x, heatmap.y) == (["0.1", "0.2", "0.3"], ["5", "10"])
    assert heatmap.values == [[5.0, 10.0, 15.0], [10.0, 20.0, 30.0]]


def test_drawn_numbers_give_points_over_each_axis() -> None:
    figure = drawn([case(0.1 * i, a__lr=10.0**-i, a__rho=0.1 * i) for i in range(1, 5)])
    assert [(panel.x_label, panel.x_scale) for panel in figure.panels] == [("a.lr", "log"), ("a.rho", "linear")]
    (curve,) = figure.panels[1].marks
    assert isinstance(curve, Curve)
    assert curve.style == "points"
    assert curve.y == pytest.approx([10, 20, 30, 40])


@pytest.mark.parametrize("keys", ["ab", "abc"])
def test_numbers_that_no_case_has_together_give_bars(keys: str) -> None:
    cases = [case(0.9, **{f"optimizer__{key}": value}) for key in keys for value in (1, 2)]
    (bars,) = drawn(cases).panels[0].marks
    assert isinstance(bars, Bars)
    assert len(bars.values) == len(cases)


def test_names_alone_give_bars_of_the_best() -> None:
    cases = [case(0.9 - i / 100, method__name=f"m{i}", train__nesterov=True) for i in range(20)]
    (bars,) = drawn(cases).panels[0].marks
    assert isinstance(bars, Bars)
    assert len(bars.categories) == 12
    assert bars.categories[0] == "m0, nesterov True"
    assert bars.values[0] == pytest.approx(90)


def test_a_single_case_can_be_drawn() -> None:
    drawn([case(0.5, optimizer__rho=0.1)])
    drawn([case(float("nan"), optimizer__rho=rho) for rho in (0.1, 0.2)])


def test_a_trial_that_was_ended_early_never_stands_above_the_chosen_one() -> None:
    trials = [
        TrialPoint("SAM", {"base.lr": 0.1}, 0.6, is_complete=True, is_best=True),
        TrialPoint("SAM", {"base.lr": 0.2}, 0.5, is_complete=True, is_best=False),
        TrialPoint("SAM", {"base.lr": 0.4}, 0.9, is_complete=False, is_best=False),  # after one easy task
    ]
    marks = {mark.name: mark for mark in search_figure("test", trials).panels[0].marks if isinstance(mark, Curve)}
    assert max(marks["ended early"].y) < min(marks["SAM"].y)


def test_panels_of_one_quantity_share_a_scale() -> None:
    panels = [Panel(name, "x", "accuracy", [Curve("a", [0, 1], [0, high])]) for name, high in (("p", 1.0), ("q", 9.0))]
    other = Panel("r", "x", "loss", [Curve("a", [0, 1], [0, 100.0])])
    figure = FigureData("f", "t", [*panels, other])
    first, second, third = draw(figure).axes
    assert first.get_ylim() == second.get_ylim() != third.get_ylim()
    layout = plot(figure)["layout"]
    assert layout["yaxis2"]["matches"] == "y"
    assert "matches" not in layout["yaxis3"]
    maps = [Panel(name, "x", "y", [Heatmap([[high]], ["a"], ["b"], "%")]) for name, high in (("p", 1.0), ("q", 9.0))]
    assert color_limits(FigureData("f", "t", maps), "%") == (1.0, 9.0)
