"""Figures of runs: the right numbers in the right places."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cflat.figures import FigureData
from cflat.figures.interactive import plot
from cflat.figures.runs import (
    RunGroup,
    SweepPoint,
    Timeline,
    accuracy_curves,
    accuracy_heatmap,
    cache_ages,
    comparison_overview,
    evaluation_timeline,
    loss_curves,
    pareto_front,
    scheduler_comparison,
    sensitivity,
    speed_front,
    trigger_timeline,
)
from cflat.figures.static import draw

PLAIN = RunGroup("plain", [[1.0, 0.8], [0.9, 0.6]], [100.0, 120.0], [1.0, 1.0], [[[1.0, None], [0.7, 0.9]]] * 2)
FLAT = RunGroup("flat", [[1.0, 0.9]], [50.0], [4.0], [[[1.0, None], [0.9, 0.9]]])
TURBO = RunGroup("turbo", [[0.9, 0.5]], [90.0], [1.5])
LINE = Timeline(
    "turbo",
    [10, 20, 30],
    [3.0, 2.0, 1.0],
    [2.0, 1.5, 1.0],
    {f"sharpness.{name}": [share] * 3 for name, share in (("refreshed", 0.1), ("reused", 0.6), ("skipped", 0.3))},
    {"sharpness": [1, 2, 3]},
)


def test_accuracy_curves_are_means_with_a_band_of_one_deviation() -> None:
    plain, flat = accuracy_curves([PLAIN, FLAT]).panels[0].marks
    assert plain.x == [1, 2]
    assert plain.y == pytest.approx([95, 70])
    deviation = 100 * np.std([0.8, 0.6], ddof=1)
    assert plain.low[1] == pytest.approx(70 - deviation)
    assert plain.high == pytest.approx([100, 70 + deviation])  # never above 100 percent
    assert (flat.low, flat.high) == (None, None)


def test_many_curves_lose_their_bands() -> None:
    figure = accuracy_curves([PLAIN] * 7)
    assert all(curve.low is None and curve.high is None for curve in figure.panels[0].marks)
    assert "Bands" not in figure.caption


def test_an_unfinished_group_is_dashed_and_as_long_as_it_got() -> None:
    begun = RunGroup("begun", [[0.9], [0.8, 0.7]], is_finished=False)
    (curve,) = accuracy_curves([begun]).panels[0].marks
    assert curve.style == "dashed"
    assert curve.y == pytest.approx([85, 70])


def test_the_heatmap_is_the_mean_over_seeds_in_percent() -> None:
    (heatmap,) = accuracy_heatmap(PLAIN).panels[0].marks
    assert heatmap.values == [[100.0, None], [70.0, 90.0]]
    assert heatmap.shows_values


def test_the_front_holds_what_no_other_beats() -> None:
    figure = speed_front([PLAIN, FLAT, TURBO])
    assert figure.meta["front"] == [0, 1]
    *points, front = figure.panels[0].marks
    assert [(point.x, point.labels) for point in points] == [
        ([110.0], ["plain"]),
        ([50.0], ["flat"]),
        ([90.0], ["turbo"]),
    ]
    assert front.x == [50.0, 110.0]


def test_evaluations_are_better_to_the_left() -> None:
    figure = speed_front([PLAIN, FLAT, TURBO], "evaluations_per_step")
    assert [mark.x for mark in figure.panels[0].marks[:3]] == [[1.0], [4.0], [1.5]]
    assert figure.meta["front"] == [0, 1]  # TURBO costs more than PLAIN and is worse


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=12))
def test_every_point_is_on_the_front_or_beaten(points: list[tuple[float, float]]) -> None:
    front = pareto_front(points)
    assert front
    for index, (x, y) in enumerate(points):
        beaten = any(a >= x and b >= y and (a, b) != (x, y) for a, b in points)
        assert (index in front) is not beaten


def test_the_overview_shows_accuracy_and_cost() -> None:
    curves, evaluations, speed = comparison_overview([PLAIN, FLAT], "title").panels
    assert [mark.name for mark in curves.marks] == ["plain", "flat"]
    assert [mark.values for mark in evaluations.marks] == [[1.0], [4.0]]
    assert speed.marks[0].deviations == pytest.approx([np.std([100, 120], ddof=1)])


def test_costs_in_different_units_have_scales_of_their_own() -> None:
    figure = comparison_overview([PLAIN, FLAT], "title")
    _, evaluations, speed = draw(figure).axes
    assert evaluations.get_ylim()[1] < 10 < 100 < speed.get_ylim()[1]
    assert not any("matches" in axis for name, axis in plot(figure)["layout"].items() if name.startswith("yaxis"))


def test_triggers_are_shares_in_percent_of_the_branches_that_there_are() -> None:
    (panel,) = trigger_timeline(LINE).panels
    assert panel.title == "Sharpness direction"
    assert {mark.name: mark.y[0] for mark in panel.marks} == pytest.approx(
        {"refreshed": 10, "reused": 60, "skipped": 30}
    )


def test_histories_are_thinned_out_and_keep_their_peaks() -> None:
    steps = list(range(100_000))
    losses = [1.0] * 100_000
    losses[54_321] = 50.0
    long = Timeline("long", steps, losses, losses, {}, {"flatness": losses})
    for make in (loss_curves, evaluation_timeline, cache_ages):
        (curve,) = make([long], 200).panels[0].marks
        assert len(curve.x) <= 200
        assert max(curve.y) == 50.0
        assert (curve.x[0], curve.x[-1]) == (0, 99_999)


def test_whose_caches_are_shown_is_said() -> None:
    bare = Timeline("plain", [1], [1], [1])
    figure = cache_ages([bare, LINE])
    assert [mark.name for panel in figure.panels for mark in panel.marks] == ["turbo"]
    assert "turbo" in figure.caption


def test_sensitivity_is_sorted_by_value_with_deviations() -> None:
    points = [SweepPoint("turbo", k, [0.9, 0.8], [100 * k, 100 * k]) for k in (100, 1, 10)]
    accuracy, speed = sensitivity("optimizer.k", points).panels
    assert accuracy.marks[0].x == [1, 10, 100]
    assert accuracy.marks[0].y == pytest.approx([85] * 3)
    assert accuracy.marks[0].low is not None
    assert speed.marks[0].y == [100, 1000, 10000]
    assert accuracy.x_scale == "log"
    assert sensitivity("optimizer.beta", [SweepPoint("a", 0.1, [1], [1])]).panels[0].x_scale == "linear"


def test_strategies_stand_side_by_side_for_each_k() -> None:
    points = [SweepPoint(name, k, [0.5], [k]) for name in ("linear", "constant") for k in (10, 5)]
    accuracy, speed = scheduler_comparison(points).panels
    assert [mark.name for mark in accuracy.marks] == ["linear", "constant"]
    assert speed.marks[1].categories == ["k = 5", "k = 10"]
    assert speed.marks[1].values == [5, 10]


@pytest.mark.parametrize(
    "figure", [accuracy_curves([PLAIN]), speed_front([PLAIN, FLAT]), trigger_timeline(LINE), accuracy_heatmap(FLAT)]
)
def test_figures_survive_json(figure: FigureData) -> None:
    assert FigureData.from_dict(figure.to_dict()) == figure
