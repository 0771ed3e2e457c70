"""Sweeps: which combinations, in which folders, and that a killed sweep goes on to the same result."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cflat import ConfigError, DataError
from cflat.runs.folder import RunFolder
from cflat.studies.space import Interval, describe, parse_sweep, read_sweep
from cflat.studies.sweep import folder_name, plan_sweep, run_sweep, write_sweep
from processes import Command
from report.pages import Page

BASE = {
    "method": "finetune",
    "data": {"name": "digits", "train_per_class": 4, "test_per_class": 4},
    "preset": "smoke",
    "stream": {"initial": 5, "increment": 5},
    "runtime": {"threads": 1},
}
AXES = {"optimizer.name": ["none", "sam"], "optimizer.rho": [0.02, 0.5]}


def sweep(axes: dict[str, Any] = AXES, **keys: Any):
    return parse_sweep({"base": BASE, "axes": axes, **keys})


def folders(axes: dict[str, Any], out: Path, **keys: Any) -> list[str]:
    return [job.out.name for found in plan_sweep(sweep(axes, **keys), out) for job in found.jobs]


# -- combinations ---------------------------------------------------------------------------------------------------


def test_a_grid_is_every_combination_without_what_an_optimizer_lacks(tmp_path: Path) -> None:
    planned = plan_sweep(sweep(seeds=[0, 3]), tmp_path)
    assert [describe(found.settings) for found in planned] == [
        "optimizer.name=none",
        "optimizer.name=sam, optimizer.rho=0.02",
        "optimizer.name=sam, optimizer.rho=0.5",
    ]
    assert [[job.out.name for job in found.jobs] for found in planned] == [
        ["none-seed0", "none-seed3"],
        ["sam-rho0.02-seed0", "sam-rho0.02-seed3"],
        ["sam-rho0.5-seed0", "sam-rho0.5-seed3"],
    ]
    assert planned[2].jobs[1].config.optimizer.keywords() == {"rho": 0.5}
    assert planned[2].jobs[1].config.seed == 3


def test_settings_of_the_base_go_to_the_optimizers_that_have_them(tmp_path: Path) -> None:
    base = {**BASE, "optimizer": {"name": "sam", "lam": 0.7, "rho": 0.3}}
    planned = plan_sweep(parse_sweep({"base": base, "axes": {"optimizer": ["none", "sam", "c_flat"]}}), tmp_path)
    keywords = [found.jobs[0].config.optimizer.keywords() for found in planned]
    assert keywords[0] == {}
    assert keywords[1]["rho"] == keywords[2]["rho"] == 0.3
    assert keywords[2]["lam"] == 0.7


def test_any_key_can_be_an_axis_and_aliases_run_once(tmp_path: Path) -> None:
    axes = {"method": ["finetune", "icarl"], "base.milestones": [[1], [1, 2]], "base.schedule": ["multistep"]}
    assert folders(axes, tmp_path) == [
        "finetune-milestones1-schedulemultistep-seed0",
        "finetune-milestones1-2-schedulemultistep-seed0",
        "icarl-milestones1-schedulemultistep-seed0",
        "icarl-milestones1-2-schedulemultistep-seed0",
    ]
    assert folders({"optimizer": ["c-flat", "c_flat"]}, tmp_path) == ["c-flat-seed0"]


VALUES = st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True)


@given(VALUES, VALUES, st.integers(0, 2**31 - 1), st.integers(1, 30))
def test_a_sample_is_a_pure_function_of_its_seed(epochs: list[int], sizes: list[int], seed: int, number: int) -> None:
    axes = {"train.epochs": epochs, "train.batch_size": sizes}
    grid = sweep(axes).combinations()
    found = sweep(axes, sample=number, sample_seed=seed).combinations()
    assert found == sweep(axes, sample=number, sample_seed=seed).combinations()
    assert len(found) == min(number, len(grid))
    assert len({describe(one) for one in found}) == len(found)
    assert all(one in grid for one in found)
    # A larger sample keeps the smaller one, so that its runs are used again.
    assert sweep(axes, sample=number + 5, sample_seed=seed).combinations()[: len(found)] == found


@given(st.integers(0, 2**31 - 1), st.integers(1, 20), st.sampled_from(["linear", "log"]))
def test_draws_lie_in_their_range_and_do_not_move(seed: int, number: int, scale: str) -> None:
    axes = {"optimizer.name": ["none", "sam"], "optimizer.rho": {"low": 0.01, "high": 0.2, "scale": scale}}
    found = sweep(axes, sample=number, sample_seed=seed).combinations()
    assert len(found) == number
    assert sum(one["optimizer.name"] == "none" for one in found) <= 1
    assert all(0.01 <= one["optimizer.rho"] <= 0.2 for one in found if "optimizer.rho" in one)
    assert sweep(axes, sample=number + 3, sample_seed=seed).combinations()[:number] == found
    more = sweep({**axes, "train.epochs": [1]}, sample=number, sample_seed=seed).combinations()
    assert [{key: one[key] for key in one if key != "train.epochs"} for one in more] == found


def test_seeds_of_a_sample_differ() -> None:
    axes = {"optimizer.name": ["sam"], "optimizer.rho": {"low": 0.01, "high": 0.2}}
    assert len({str(sweep(axes, sample=3, sample_seed=seed).combinations()) for seed in range(20)}) == 20
    grid = {"train.epochs": list(range(1, 11))}
    assert len({str(sweep(grid, sample=3, sample_seed=seed).combinations()) for seed in range(20)}) > 15


def test_a_logarithmic_range_gives_every_decade_its_share() -> None:
    interval = Interval(low=1e-4, high=1.0, scale="log")
    assert [interval.at(share) for share in (0, 0.25, 0.5, 0.75, 1)] == [1e-4, 1e-3, 1e-2, 1e-1, 1.0]
    assert Interval(low=0.0, high=10.0).at(0.123456) == 1.235


def test_a_range_with_few_values_ends(tmp_path: Path) -> None:
    axes = {"base.lr": {"low": 0.1, "high": 0.1000001}}
    found = sweep(axes, sample=50).combinations()
    assert 1 <= len(found) < 50


# -- folders --------------------------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.sampled_from(["a.b", "optimizer.name", "c.d"]), st.text() | st.floats() | st.lists(st.text()))
)
def test_names_of_folders_are_safe(settings: dict[str, Any]) -> None:
    assert re.fullmatch(r"[A-Za-z0-9._-]{0,120}", folder_name(settings))


def test_values_that_look_alike_get_folders_of_their_own(tmp_path: Path) -> None:
    weights = ["/one/best.pt", "/two/best.pt"]
    names = folders({"backbone.weights": weights}, tmp_path)
    assert names[0] == "weightsbest-seed0"
    assert re.fullmatch(r"weightsbest-[0-9a-f]{8}-seed0", names[1])
    assert set(folders({"backbone.weights": weights[::-1]}, tmp_path)) != set(names)
    for found in plan_sweep(sweep({"backbone.weights": weights}), tmp_path):
        found.jobs[0].out.mkdir()
        RunFolder(found.jobs[0].out).config_file.write_text(found.jobs[0].config.to_yaml())
    assert folders({"backbone.weights": weights[::-1]}, tmp_path) == names[::-1]


def test_a_run_keeps_its_folder_when_axes_are_added(tmp_path: Path) -> None:
    for found in plan_sweep(sweep(), tmp_path):
        found.jobs[0].out.mkdir()
        RunFolder(found.jobs[0].out).config_file.write_text(found.jobs[0].config.to_yaml())
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.yaml").write_text("no: configuration")
    names = folders({"train.epochs": [1, 2], **AXES}, tmp_path)
    assert names == [
        "none-seed0",
        "sam-rho0.02-seed0",
        "sam-rho0.5-seed0",
        "epochs2-none-seed0",
        "epochs2-sam-rho0.02-seed0",
        "epochs2-sam-rho0.5-seed0",
    ]


def test_a_changed_base_does_not_mix_runs(tmp_path: Path) -> None:
    (found, *_) = plan_sweep(sweep(), tmp_path)
    found.jobs[0].out.mkdir()
    RunFolder(found.jobs[0].out).config_file.write_text(found.jobs[0].config.to_yaml())
    changed = parse_sweep({"base": {**BASE, "train": {"epochs": 3}}, "axes": AXES})
    with pytest.raises(DataError, match="another configuration"):
        run_sweep(changed, tmp_path)


# -- wrong files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axis": {}}, "Unknown key 'sweep.axis'. Did you mean 'axes'?"),
        ({"axes": {}}, "sweep.axes must name at least one key"),
        ({"axes": [1]}, "sweep.axes must be a valid dictionary"),
        ({"axes": {3: [1]}}, "sweep.axes must have keys that are text, got 3."),
        ({"axes": {"optimizer.rho": []}}, "sweep.axes.optimizer.rho must list values"),
        ({"axes": {"optimizer.rho": 0.1}}, "sweep.axes.optimizer.rho must list values"),
        ({"axes": {"train.epochs": [1, 1]}}, "must list different values"),
        ({"axes": {"train..epochs": [1]}}, "must name keys once each"),
        ({"axes": {"optimizer": ["sam"], "optimizer.name": ["none"]}}, "must name keys once each"),
        ({"axes": {"optimizer.rho": [0.1]}}, "Unknown key 'optimizer.rho'"),
        ({"axes": {**AXES, "optimizer.roh": [0.1]}}, "Did you mean 'rho'?"),
        ({"axes": {"optimizer.name": ["samm"]}}, "Did you mean 'sam'?"),
        ({"axes": {"optimizer.name": {"low": 0, "high": 1}}, "sample": 2}, "must list optimizers"),
        ({"axes": {"seed": [0, 1]}}, "list seeds under sweep.seeds"),
        ({"base": {**BASE, "seed": 1}}, "list seeds under sweep.seeds"),
        ({"base": "digits"}, "sweep.base must be a valid dictionary"),
        ({"base": {**BASE, "optimizer": 3}}, "sweep.base.optimizer must hold keys and values"),
        ({"base": {**BASE, "optimizer": {"roh": 3}}}, "Unknown key 'optimizer.roh'"),
        ({"seeds": []}, "sweep.seeds must list different seeds"),
        ({"seeds": [1, 1]}, "sweep.seeds must list different seeds"),
        ({"seeds": [-1]}, "sweep.seeds must be"),
        ({"sample": 0}, "sweep.sample must be"),
        ({"axes": {"base.lr": {"low": 0.1, "high": 1}}}, "sweep.sample must say how many"),
        ({"axes": {"base.lr": {"low": 1, "high": 0.1}}, "sample": 2}, "must have numbers low < high"),
        ({"axes": {"base.lr": {"low": 0, "high": 1, "scale": "log"}}, "sample": 2}, "0 < low < high"),
        ({"axes": {"base.lr": {"low": 0}}, "sample": 2}, "must have numbers low < high"),
        ({"axes": {"base.lr": {"low": 0, "high": 1, "scale": "lin"}}, "sample": 2}, "sweep.axes.base.lr.scale"),
        ({"axes": {"base.lr": {"lo": 0, "high": 1}}, "sample": 2}, "Did you mean 'low'?"),
        ({"axes": {"base.lr": list(range(1, 200)), "train.epochs": list(range(1, 200))}}, "39601 runs"),
        ({"seeds": list(range(20_000))}, "more than 10000; list fewer values or seeds"),
        ({"axes": {"base.lr": {"low": 0.1, "high": 1}}, "sample": 200, "seeds": list(range(100))}, "has 20000 runs"),
    ],
)
def test_wrong_sweeps_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_sweep({"base": BASE, "axes": AXES, **change}).combinations()


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"train.epoch": [1]}, "With train.epoch=1: Unknown key 'train.epoch'. Did you mean 'epochs'?"),
        ({"optimizer.name": ["sam"], "optimizer.rho": [0.1, -1]}, "With optimizer.name=sam, optimizer.rho=-1: "),
        ({"method.name": ["icarl"], "train.epochs": ["many"]}, "With method.name=icarl, train.epochs=many: "),
    ],
)
def test_a_wrong_combination_is_named_before_any_run(axes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_sweep(sweep(axes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["sam", "none"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["low", "high", "name", "x"]), inner),
    max_leaves=6,
)
KEYS = st.sampled_from(["optimizer", "optimizer.rho", "optimizer.name.x", "train", "train.epochs", "seed", "a..b", ""])


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "base": ANY
            | st.fixed_dictionaries({"method": st.just("icarl"), "data": st.just("digits"), "optimizer": ANY}),
            "axes": ANY | st.dictionaries(KEYS, ANY | st.lists(ANY, min_size=1, max_size=3)),
            "seeds": ANY | st.lists(st.integers(), max_size=3),
            "sample": ANY | st.integers(1, 20),
            "sample_seed": ANY,
            "name": ANY,
        },
    )
)
def test_any_document_gives_a_plan_or_one_sentence(document: dict[str, Any]) -> None:
    message = ""
    try:
        plan_sweep(parse_sweep(document), Path("/no/such/folder"))
    except ConfigError as error:
        message = str(error)
    assert "\n" not in message


def test_files_are_read_and_named(tmp_path: Path) -> None:
    file = tmp_path / "my sweep.yaml"
    file.write_text(yaml.safe_dump({"base": BASE, "axes": AXES}))
    assert read_sweep(file).name == "my sweep"
    file.write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match="must hold sections"):
        read_sweep(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_sweep(tmp_path / "none.yaml")


# -- real runs ------------------------------------------------------------------------------------------------------


def test_a_best_combination_is_chosen_by_validation_images_alone(tmp_path: Path) -> None:
    base = {**BASE, "data": {**BASE["data"], "validation": 0.2}}
    result = run_sweep(parse_sweep({"base": base, "axes": AXES}), tmp_path)
    write_sweep(tmp_path, result)
    content = json.loads((tmp_path / "sweep.json").read_text())
    scores = [row["validation"]["avg"]["mean"] for row in content["rows"]]
    assert scores == sorted(scores, reverse=True)
    assert content["best"] == content["rows"][0]["settings"]
    assert content["images"] == "test"


def test_rows_on_test_and_on_validation_images_are_never_called_one_of_them(tmp_path: Path) -> None:
    base = {**BASE, "data": {**BASE["data"], "validation": 0.2}}
    result = run_sweep(parse_sweep({"base": base, "axes": {"data.evaluate": ["test", "validation"]}}), tmp_path)
    assert result.split == "test or validation"
    assert [replace(result, rows=(row,)).split for row in result.rows] == ["test", "validation"]


def test_results_are_written_in_their_order_and_none_is_chosen_by_test_images(tmp_path: Path) -> None:
    result = run_sweep(sweep(seeds=[0, 1]), tmp_path)
    picture, page = write_sweep(tmp_path, result)
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert [row["settings"] for row in content["rows"]] == [row.settings for row in result.rows]
    assert content["best"] is None
    summaries = [RunFolder(Path(path)).load_summary() for path in content["rows"][0]["runs"]]
    assert content["rows"][0]["avg"]["mean"] == pytest.approx(sum(one.headline.avg for one in summaries) / 2)
    assert {row["avg"]["n"] for row in content["rows"]} == {2}
    rows = list(csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines()))
    assert [(row["optimizer.name"], row["optimizer.rho"], row["seed"]) for row in rows] == [
        ("none", "", "0"),
        ("none", "", "1"),
        ("sam", "0.02", "0"),
        ("sam", "0.02", "1"),
        ("sam", "0.5", "0"),
        ("sam", "0.5", "1"),
    ]
    for row in rows:
        assert float(row["avg"]) == RunFolder(Path(row["run"])).load_summary().headline.avg
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = Page(page.read_text())
    assert shown.outside() == []
    assert "sam-rho0.5-seed1" in shown.texts


def test_a_killed_sweep_goes_on_to_the_same_result(tmp_path: Path) -> None:
    document = {
        "base": {**BASE, "train": {"epochs": 10, "checkpoint_minutes": 0}},
        "axes": {"optimizer": ["none", "sam"]},
    }
    file = tmp_path / "kill.yaml"
    file.write_text(yaml.safe_dump(document))
    out = tmp_path / "out"
    command = Command("sweep", file, "--out", out, "--json", folder=tmp_path)
    assert command.wait_until(lambda: any((out / "sam-seed0" / "checkpoints").glob("*.pt")))
    command.kill()
    assert RunFolder(out / "none-seed0").is_finished
    assert not RunFolder(out / "sam-seed0").is_finished
    finished = (out / "none-seed0" / "summary.json").stat().st_mtime_ns
    resumed = run_sweep(read_sweep(file), out)
    whole = run_sweep(read_sweep(file), tmp_path / "whole")
    assert (out / "none-seed0" / "summary.json").stat().st_mtime_ns == finished
    for found, expected in zip(resumed.rows, whole.rows, strict=True):
        assert found.summaries[0].headline == expected.summaries[0].headline
        assert found.summaries[0].cost.evaluations == expected.summaries[0].cost.evaluations
