"""Watching a run, analysing it, probing it: on digits, with the command line, and with wrong input."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import pytest

from cflat._errors import ConfigError, DataError
from cflat.cli.main import run_app
from cflat.config.choices import parse_optimizer
from cflat.config.presets import radius_of, resolve_config
from cflat.config.run_config import RunConfig
from cflat.figures import FigureData
from cflat.runs.folder import RunFolder, find_runs
from cflat.runs.interrupts import StopRequest
from cflat.runs.run import run
from cflat.studies.analyze import analyze, plan_variants
from cflat.studies.probe_run import probe_run
from cflat.studies.recording import Recording, check_watchable
from processes import interrupted

FIGURES = {
    "connectivity",
    "correction_ratios",
    "evolution",
    "gradient_drift",
    "normality",
    "planes",
    "schedulers",
    "sensitivity-optimizer.beta",
    "sensitivity-optimizer.k",
    "slices",
    "spectra",
    "terms_over_tasks",
}


def make_config(optimizer: str = "c_flat_turbo", method: str = "icarl", **train: object) -> RunConfig:
    return resolve_config(
        {
            "method": method,
            "data": {"name": "digits", "train_per_class": 8, "test_per_class": 4},
            "preset": "cpu",
            "optimizer": optimizer,
            "stream": {"initial": 4, "increment": 3, "max_tasks": 2},
            "train": {"epochs": 2, "batch_size": 8, **train},
            "backbone": {"name": "vit_smoke" if method in ("ease", "ranpac") else "small_cnn"},
        }
    )


@pytest.mark.parametrize(
    ("method", "optimizer"), [("icarl", "none"), ("icarl", "c_flat_turbo"), ("memo", "sam"), ("ease", "c_flat")]
)
def test_watching_changes_no_bit_of_a_run(method: str, optimizer: str, tmp_path: Path):
    config = make_config(optimizer, method)
    recording = Recording(0.05, every=2)
    lines = []
    for folder, observers in ((tmp_path / "plain", []), (tmp_path / "watched", [recording])):
        summary = run(config, folder, observers=observers)
        losses = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines.append(([entry.get("loss") for entry in losses], summary.headline.accuracy.tolist()))
    assert str(lines[0]) == str(lines[1])
    records = recording.recorder.records
    assert {record.task for record in records} == {0, 1}
    assert all((record.step + 1) % 2 == 0 for record in records)
    assert all({"g", "g_0", "g_vs", "g_vf"} <= set(record.norms) for record in records)
    assert any(record.distances for record in records)
    assert [entry["task"] for entry in recording.landscapes["lines"]] == [0, 1]
    assert len(recording.landscapes["plane"]["losses"]) == 11
    assert len(recording.landscapes["eigenvalues"]["values"]) == 3


def test_the_line_goes_through_the_trained_loss_and_connections_end_at_it():
    recording = Recording(0.05, every=2)
    run(make_config("none"), observers=[recording])
    found = recording.landscapes
    centre = found["lines"][1]["losses"][15]
    assert found["lines"][1]["distances"][15] == 0
    assert found["plane"]["losses"][5][5] == pytest.approx(centre, rel=1e-6)
    assert found["connections"][0]["task"] == 1
    assert found["connections"][0]["losses"][-1] == pytest.approx(centre, rel=1e-6)
    assert found["connections"][0]["losses"][0] > centre  # the weights before the task do not know it


def test_all_figures_are_made_once_and_read_back(tmp_path: Path):
    config, told = make_config(), []

    def note(variant, index, total):
        told.append((variant.name, index, total))

    figures = analyze(config, tmp_path, every=2, tell=note)
    assert {figure.name for figure in figures} == FIGURES
    assert len(told) == len(plan_variants(config)) == 9
    for figure in figures:
        values = json.loads((tmp_path / f"{figure.name}.json").read_text())
        assert FigureData.from_dict(values).title == figure.title
        assert (tmp_path / f"{figure.name}.svg").read_text().startswith("<?xml")
        assert any(mark for panel in figure.panels for mark in panel.marks)
    analyze(config, tmp_path, every=2, tell=note, formats=[])
    assert len(told) == 9  # nothing was trained again
    none = tmp_path / "runs" / "none-every2-landscapes"
    assert RunFolder(none).load_summary().config.optimizer.name == "none"
    (none / "recording.json").write_text("{")
    with pytest.raises(DataError, match="to record it again"):
        analyze(config, tmp_path, every=2, tell=note, formats=[])
    rmtree(none)
    analyze(config, tmp_path, every=2, tell=note, formats=[])
    assert [name for name, _, _ in told[9:]] == ["none"]


def test_some_figures_are_made_with_no_more_runs_than_they_need(tmp_path: Path):
    config, told = make_config("c_flat"), []

    def note(variant, index, total):
        told.append(variant.name)

    (figure,) = analyze(config, tmp_path, every=2, only=["gradient_drift"], tell=note)
    assert (figure.name, told) == ("gradient_drift", ["c_flat"])
    (figure,) = analyze(config, tmp_path, every=2, only=["evolution"], tell=note)
    assert (figure.name, told) == ("evolution", ["c_flat", "none", "c_flat_turbo"])
    assert {path.name for path in tmp_path.glob("*.svg")} == {"gradient_drift.svg", "evolution.svg"}
    with pytest.raises(ConfigError, match="'planes' cannot be made alone"):
        analyze(config, tmp_path, only=["planes"])


def test_a_method_that_trains_in_its_first_task_alone_has_no_last_landscape(tmp_path: Path):
    config = make_config("none", "ranpac")
    figures = analyze(config, tmp_path, every=2, formats=[])
    assert {figure.name for figure in figures} == FIGURES - {"planes", "spectra", "connectivity"}


def test_variants_keep_everything_but_the_optimizer():
    config = make_config("sam")
    variants = plan_variants(config, seeds=[7])
    assert variants[0].config == config
    assert [variant.name for variant in variants if variant.is_recorded] == ["sam", "none", "c_flat", "c_flat_turbo"]
    for variant in variants:
        assert replace(variant.config, optimizer=config.optimizer, seed=config.seed) == config
        assert variant.config.optimizer.keywords().get("rho", 0.1) == config.optimizer.keywords()["rho"]
    assert len({variant.name for variant in variants}) == len(variants)
    assert len([variant for variant in variants if variant.config.seed == 7]) == 9


@pytest.mark.parametrize("schedule", [True, False])
def test_every_point_of_a_figure_has_a_run_and_all_are_watched_at_one_radius(schedule: bool):
    base = make_config()
    own = parse_optimizer({"name": "c_flat_turbo", "rho": 0.3, "k": 7, "schedule": schedule})
    config = replace(base, optimizer=own)
    printed = parse_optimizer({"name": "c_flat_turbo", "rho": 0.3, "k": 5, "beta": 0.8})
    turbo = [v.config.optimizer.keywords() for v in plan_variants(config) if v.config.optimizer.name == own.name]
    for change in (
        {"k": 2},
        {"k": 5},
        {"k": 10},
        {"beta": 0.4},
        *({"k": k, "schedule": s} for k in (5, 10) for s in (True, False)),
    ):
        assert {**printed.keywords(), **change} in turbo, change
    assert radius_of(config) == 0.3
    assert radius_of(replace(base, optimizer=parse_optimizer({"name": "none"}))) == 0.1  # iCaRL's
    assert radius_of(replace(base, optimizer=parse_optimizer({"name": "asam", "rho": 2.0}))) == 0.1


@pytest.mark.parametrize(
    ("runtime", "words"), [({"devices": 2}, "runtime.devices=1"), ({"precision": "16"}, "loss scale")]
)
def test_what_cannot_be_watched_is_refused(runtime, words):
    with pytest.raises(ConfigError, match=words):
        check_watchable(replace(make_config().runtime, **runtime))


def test_an_unknown_format_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="gif"):
        analyze(make_config(), tmp_path, formats=["gif"])


def test_a_probe_looks_at_the_wanted_steps_and_stops():
    seen = []
    found = probe_run(make_config(), (0.05, 0.5), steps=4, warmup=1, task=1, tell=seen.append)
    assert seen == [1, 2, 3, 4]
    assert found.steps == 4
    assert {row.rho for row in found.rows} == {0.05, 0.5}
    assert found.row(0.05, "C-Flat").evaluations_per_step == 4


def test_a_probe_that_is_stopped_before_its_first_step_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    words = ["probe", "--method", "icarl", "--data", "digits", *KEYS, "train.epochs=100000", "--warmup", "1000000"]
    with interrupted(lambda: isinstance(getattr(signal.getsignal(signal.SIGINT), "__self__", None), StopRequest)):
        assert run_app(words) == 130
    assert "Stopped before the first probed step" in capsys.readouterr().err


def test_a_probe_without_steps_says_what_to_do():
    with pytest.raises(ConfigError, match="smaller --warmup"):
        probe_run(make_config(), (0.05,), steps=4, warmup=1000)


KEYS = ["data.train_per_class=8", "data.test_per_class=4", "stream.max_tasks=2", "train.epochs=1", "train.batch_size=8"]


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    chosen = ["--method", "icarl", "--data", "digits", *KEYS]
    assert run_app(["probe", *chosen, "--steps", "2", "--warmup", "0", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["steps"] == 2
    assert Path(values["figure"]).read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "runs/probe-icarl-digits/probe.json").read_text())["verdict"] == values["verdict"]
    assert run_app(["probe", *chosen, "--steps", "2", "--warmup", "0", "--radii", "0.1"]) == 0
    text = capsys.readouterr().out
    assert "cos plain" in text
    assert "At rho = 0.1 exact C-Flat has cosine" in text
    assert run_app(["analyze", *chosen, "--every", "2", "--formats", "", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert set(made["figures"]) == FIGURES
    assert (tmp_path / "runs/analyze-icarl-digits/summary.json").is_file()
    inside = tmp_path / "runs/analyze-icarl-digits/analysis/runs"
    assert not [path for path in inside.iterdir() if path.name.startswith("none-every")]  # it was not trained twice
    assert len(list(find_runs(tmp_path / "runs"))) == 1
    assert run_app(["analyze", "runs/analyze-icarl-digits", "--every", "2", "--formats", ""]) == 0
    assert "cflat report runs/analyze-icarl-digits" in capsys.readouterr().out
    before = set(inside.iterdir())
    only = ["--only", "gradient_drift", "--formats", "", "--every", "2"]
    assert run_app(["analyze", "runs/analyze-icarl-digits", *only]) == 0
    assert set(inside.iterdir()) == before  # a recording with landscapes has the gradients, too


def test_a_run_that_is_analysed_in_part_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    only = ["--only", "gradient_drift", "--formats", "", "--every", "2"]
    assert run_app(["analyze", "--method", "icarl", "--data", "digits", *KEYS, *only, "--out", "run"]) == 0
    assert not Path("run/analysis/runs").exists()
    assert json.loads(Path("run/recording.json").read_text())["landscapes"]["lines"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["analyze", "nowhere"], "is not a run directory"),
        (["analyze", "one", "two"], "Give one run directory"),
        (["analyze", "one", "--method", "icarl"], "Give one run directory"),
        (["analyze", "--method", "icarl", "--data", "digits", "--seeds", "x"], "--seeds must be whole numbers"),
        (["analyze", "--method", "icarl", "--data", "digits", "--seeds=1,-1"], "Seeds must be whole numbers from 0"),
        (["analyze", "--method", "icarl", "--data", "digits", "--formats", "gif"], "Unknown format 'gif'"),
        (["analyze", "--method", "simplecil", "--data", "digits", "--preset", "smoke"], "takes no step"),
        (["probe", "--method", "icarl", "--data", "digits", "--radii", "a"], "--radii must be numbers above 0"),
        (["probe", "--method", "icarl", "--data", "digits", "--radii", "0.1,-1"], "--radii must be numbers above 0"),
        (["probe", "--method", "simplecil", "--data", "digits", "--preset", "smoke"], "no step to probe"),
    ],
)
def test_mistakes_get_one_sentence(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_app(arguments) == 2
    message = capsys.readouterr().err
    assert words in message
    assert "Traceback" not in message


def test_a_probe_that_cannot_be_written_is_refused_before_it_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cflat.studies.probe_run.probe_run", None)
    Path("taken").write_text("")
    assert run_app(["probe", "--method", "icarl", "--data", "digits", "--out", "taken/here"]) == 2
    assert "cannot be made" in capsys.readouterr().err
