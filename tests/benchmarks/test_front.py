"""The front's arithmetic: the same trials for every row, paired intervals, edges, and tables of what is finished."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from scipy.stats import ttest_rel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import front_figures as figures
import front_runs as front
import front_tables as tables
from front_streams import ROWS, STREAMS, Places

sys.path.pop(0)  # benchmarks/data.py would hide the folder tests/data

from cflat.config.presets import resolve_config
from cflat.optim import list_optimizers

PLACES = Places(Path("/data"), Path("/weights.safetensors"), Path("/features.npz"))


def test_more_trials_begin_with_the_same_ones_and_stay_in_the_range() -> None:
    bench = STREAMS["digits-task"]
    few, many = (front.design(bench, trials) for trials in (4, 16))
    assert many[:4] == few
    assert len({point.rate for point in many}) == 16
    assert all(bench.rates[0] < point.rate < bench.rates[1] for point in many)
    assert all(bench.radii[0] < point.radius < bench.radii[1] for point in many)


def test_every_optimizer_has_a_row_and_every_row_a_configuration_on_every_stream() -> None:
    assert {row.optimizer["name"] for row in ROWS.values()} == set(list_optimizers())
    request = front.Front(Path("out"), PLACES, 2, 1, None, 1, front.Progress(1.0))
    for bench in STREAMS.values():
        point = front.design(bench, 1)[0]
        for row in ROWS.values():
            config = request.config(bench, point.layer(row), split="validation", seed=3)
            assert (config.seed, config.base.lr) == (3, front.rounded(point.rate * row.rate))
            assert (config.data.validation, config.data.evaluate) == (front.VALIDATION, "validation")
            assert config == resolve_config(config.to_dict())
            if row.radius is not None:
                assert config.optimizer.keywords()["rho"] == front.rounded(point.radius * row.radius)


def test_final_runs_hold_no_training_images_out_and_look_at_test_images() -> None:
    request = front.Front(Path("out"), PLACES, 2, 1, None, 1, front.Progress(1.0))
    for bench in STREAMS.values():
        config = request.config(bench, front.design(bench, 1)[0].layer(ROWS["none"]), split="test", seed=100)
        assert (config.data.validation, config.data.evaluate) == (0.0, "test")
        assert not set(request.final_seeds(bench)) & set(range(front.TUNING_SEED, front.TUNING_SEED + 10))


def test_conditions_that_are_known_are_kept_and_the_tuned_ones_are_the_final_runs(tmp_path: Path) -> None:
    trials = [{"avg": avg} for avg in (0.5, 0.7, 0.6)]
    best = front.best_of(front.design(STREAMS["digits-class"], 3), trials)
    finals = {column: [0.1, 0.2, 0.3, 0.4] for column in front.KEPT}
    known = {"radius x4": {column: [0.5, 0.6] for column in front.KEPT}}
    row = {"settings": best.layer(ROWS["turbo"]), "tuning": [3, 1], "trials": trials, **finals}
    published = {"digits-class": {"rows": {"turbo": row}, "robustness": {"turbo": known}}}
    request = front.Front(tmp_path, PLACES, 3, 1, 2, 1, front.Progress(1.0), published, ("radius x4",))
    found = front.run_robustness(request, "digits-class", "turbo")
    runs = 3 * 1 + 2 * len(("tuned", "radius x4"))  # trials, and two seeds of each condition: all counted as done
    assert request.progress.done == pytest.approx(runs * STREAMS["digits-class"].seconds * ROWS["turbo"].evaluations)
    assert found == {**known, "tuned": {column: [0.1, 0.2] for column in front.KEPT}}
    fewer = replace(
        request, seeds=1, published={"digits-class": {"rows": {"turbo": row}, "robustness": {"turbo": found}}}
    )
    assert front.run_robustness(fewer, "digits-class", "turbo") == found


def test_away_from_the_tuned_settings_only_rows_with_a_radius_have_greater_radii() -> None:
    point = front.Point(0.1, 0.2)
    plain, flat = (front.away_from(point, ROWS[name]) for name in ("none", "c_flat"))
    assert tuple(flat) == front.CONDITIONS
    assert list(plain) == [condition for condition in flat if "radius" not in condition]
    found = {name: (layer["base"]["lr"], layer["optimizer"]["rho"]) for name, layer in flat.items()}
    assert (found["rate x0.5"], found["radius x4"], found["batch 64"]) == ((0.05, 0.2), (0.1, 0.8), (0.1, 0.2))
    assert flat["batch 64"]["train"] == {"batch_size": 64}


def test_intervals_are_those_of_the_paired_t_test() -> None:
    values, reference = [0.81, 0.84, 0.79, 0.88], [0.80, 0.80, 0.80, 0.85]
    mean, half = tables.interval(values, reference)
    expected = ttest_rel(values, reference).confidence_interval(0.95)
    assert (mean - half, mean + half) == pytest.approx((100 * expected.low, 100 * expected.high))


def test_the_best_at_the_end_of_a_range_is_marked() -> None:
    points = front.design(STREAMS["digits-task"], 8)
    highest = max(points, key=lambda point: point.rate)
    inside = sorted(points, key=lambda point: point.rate)[3]
    assert "rate high" in front.edges(highest, points, ROWS["sam"])
    assert front.edges(inside, points, ROWS["none"]) == []


def test_tables_hold_what_is_finished(tmp_path: Path) -> None:
    layer = {"base": {"lr": 0.01}, "optimizer": {"name": "none"}}
    trials = [{"rate": 0.01, "radius": None, "avg": 0.8, "last": 0.7}]
    for name, shift in (("none", 0.0), ("turbo", 0.02)):
        numbers = {key: [0.8 + shift, 0.82 + 2 * shift] for key in ("avg", "last", "forgetting")}
        result = {
            "title": ROWS[name].title,
            "settings": layer,
            "trials": trials,
            "edge": [],
            "end_loss": [0.02, 0.02],
            **numbers,
        }
        folder = tmp_path / "digits-task" / name
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps({**result, "evaluations_per_step": [1.3, 1.3]}))
    (tmp_path / "digits-task" / "speed.json").write_text(json.dumps({"turbo": {"relative": 0.75, "evaluations": 1.3}}))
    tables.write_tables(tmp_path, tmp_path / "tables")
    text = (tmp_path / "tables" / "front.md").read_text()
    assert "| C-Flat Turbo | 0.01 | - | 84.0 | 84.0 | 1.30 | 0.75 | +3.0 ± 12.7 |" in text
    assert "| C-Flat Turbo | 0.75 (1.30) |" in text
    assert "| C-Flat Turbo | 1.30 | +3.0 ± 12.7 (2) |" in text
    assert "features-task" not in text
    assert (tmp_path / "tables" / "digits-task.png").stat().st_size > 10_000


def test_curves_away_from_the_tuned_settings_have_the_tuned_ones_in_their_place() -> None:
    conditions = {
        "tuned": 0.8,
        "batch 64": 0.5,
        "rate x0.5": 0.7,
        "batch 4": 0.9,
        "rate x4": 0.1,
        "as Turbo, rate x2": 0,
    }
    row = {condition: {"avg": [avg, avg + 0.02]} for condition, avg in conditions.items()}
    expected = {"rate x": [(0.5, 71), (1, 81), (4, 11)], "batch ": [(4, 91), (16, 81), (64, 51)], "radius x": [(1, 81)]}
    for kind, points in expected.items():
        assert [(x, pytest.approx(avg)) for x, avg in points] == figures.robustness_curve(row, kind, batch_size=16)


def test_rows_are_comparable_rows_from_their_settings_where_they_have_seeds(tmp_path: Path) -> None:
    many, few = ({"tuned": {"avg": [0.8] * n}, "rate x2": {"avg": [0.7] * n}} for n in (3, 2))
    streams = {
        "digits-task": {"robustness": {"none": many, "turbo": many, "turbo-still": many}},
        "icarl": {"robustness": {"none": few, "turbo": many}},
        "ease": {},
    }
    found = figures.comparable_rows(streams)
    assert found == {"digits-task": {"none": many, "turbo": many}}
    figures.draw_robustness(found, tmp_path / "robustness.png")
    assert (tmp_path / "robustness.png").stat().st_size > 10_000


def test_the_ledger_keeps_what_other_machines_found_and_prefers_what_is_newer() -> None:
    row = {"avg": [0.8]}
    old = {
        "streams": {"digits-task": {"rows": {"none": row, "turbo": row}}},
        "speed": {"ease": {"none": {"relative": 1}}},
    }
    new = {
        "streams": {"digits-task": {"rows": {"turbo": {"avg": [0.9]}}, "watched": {"none": {"trace": [1.0]}}}},
        "speed": {"ease": {"turbo": {"relative": 0.8}}},
    }
    found = tables.merged(old, new)
    assert found["streams"]["digits-task"]["rows"] == {"none": row, "turbo": {"avg": [0.9]}}
    assert found["streams"]["digits-task"]["watched"] == {"none": {"trace": [1.0]}}
    assert found["speed"]["ease"] == {"none": {"relative": 1}, "turbo": {"relative": 0.8}}
    assert tables.merged(None, new)["streams"].keys() == {"digits-task"}
    assert tables.merged(found, tables.collect(Path("/nowhere"))) == found


def test_the_summary_compares_turbo_with_the_better_of_plain_and_c_flat() -> None:
    plain, flat, turbo = [0.80, 0.82, 0.81, 0.83], [0.84, 0.86, 0.85, 0.87], [0.83, 0.85, 0.845, 0.85]
    rows = {
        name: {"avg": values, "last": values, "evaluations_per_step": [1.3]}
        for name, values in (("none", plain), ("c_flat", flat), ("turbo", turbo))
    }
    text = "\n".join(tables._summary({"digits-task": {"rows": rows}}))
    assert "| +2.9 ± 1.0 / +2.9 ± 1.0 (4) | - | -1.1 ± 1.0 / -1.1 ± 1.0 (4) |" in text
    assert text.endswith("not excluded: Avg to C-Flat down to -2.1, Last to C-Flat down to -2.1 |")
    del rows["c_flat"]
    assert "\n".join(tables._summary({"digits-task": {"rows": rows}})).endswith("excluded (SGD alone) |")


@pytest.mark.parametrize("page", ["README.md", "docs/results/README.md", "docs/optimizers/c_flat_turbo.md"])
def test_differences_that_are_quoted_are_those_of_the_ledger(page: str) -> None:
    root = Path(__file__).resolve().parents[2]
    streams = tables.published_streams(root / "docs" / "results" / "front")
    known = set()
    for rows in (values[part] for values in streams.values() for part in ("rows", "first-task") if part in values):
        for row, other in permutations(rows.values(), 2):
            avg, last = (tables.difference(tables.interval(row[m], other[m])) for m in ("avg", "last"))
            known |= {avg, last, f"{avg} / {last}", avg.lstrip("+"), last.lstrip("+")}
    number = r"[+-]?\d+\.\d ± \d+\.\d"
    quoted = re.findall(rf"{number}(?: / {number})?", (root / page).read_text(encoding="utf-8"))
    assert quoted
    assert [text for text in quoted if text not in known] == []
