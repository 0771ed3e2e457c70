"""Tuning: equal budgets, validation images alone, and searches that go on after a kill."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cflat._errors import ConfigError, DataError
from cflat.config.documents import merge
from cflat.data import load_dataset
from cflat.runs.folder import RunFolder
from cflat.runs.jobs import Job, SerialExecutor, finish_jobs
from cflat.studies.compare import compare
from cflat.studies.curve import plateau, rate_curves, write_curves
from cflat.studies.space import Interval
from cflat.studies.tune import parse_range, stages_of, tune, write_search
from cflat.studies.tuned import Tuning, read_tuning, require_tuned, validation_score

SMOKE: dict[str, Any] = {
    "method": "replay",
    "data": {"name": "digits", "validation_per_class": 6, "train_per_class": 8},
    "preset": "smoke",
    "stream": {"max_tasks": 2},
    "runtime": {"threads": 1},
}
BEHIND = merge(SMOKE, {"train": {"epochs": 4}, "data": {"train_per_class": 20}})
"""With these, a learning rate of 1e-9 is behind after the first task."""
KILLED = """
import json, os, signal, sys
import optuna
from optuna.samplers import BaseSampler, TPESampler
from cflat.runs.jobs import SerialExecutor
from cflat.studies.tune import tune
from cflat.train import Observer

chosen, out, moment, options = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
options["ranges"] = {key: tuple(values) for key, values in options.get("ranges", {}).items()}

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

class Killer(Observer):
    def on_task_end(self, record):
        if record.task == 1:
            kill()

def observe(job):
    return [Killer()] if moment == "training" and job.out.name.startswith("sam-001") else []

def drawn(self, study, trial, name, distribution, draw=optuna.samplers.TPESampler.sample_independent):
    if moment == "drawing" and trial.number == 1 and name == "optimizer.rho":
        kill()  # the learning rate is drawn, the radius is not
    return draw(self, study, trial, name, distribution)

def judged(self, judge=optuna.trial.Trial.should_prune):
    verdict = judge(self)
    if moment == "judging" and verdict and self.number == 3:
        kill()  # before the verdict is stored
    return verdict

TPESampler.sample_independent = drawn
optuna.trial.Trial.should_prune = judged
tune(chosen, ["none", "sam"], out, executor=SerialExecutor(observe), **options)
"""


def search(out: Path, chosen: dict[str, Any] | None = None, **options: Any) -> Tuning:
    return tune(chosen or SMOKE, ["none", "sam"], out, **{"trials": 3, **options})


def essence(tuning: Tuning) -> dict[str, Any]:
    """What must not depend on time or place."""
    return {
        name: [(t.number, t.settings, t.state, t.score, t.num_tasks, t.evaluations) for t in tuned.trials]
        for name, tuned in tuning.optimizers.items()
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tuning]:
    out = tmp_path_factory.mktemp("search")
    return out, search(out)


def test_every_optimizer_has_the_same_number_of_trials_and_the_preset_is_the_first(found: tuple[Path, Tuning]) -> None:
    _, tuning = found
    assert {name: len(tuned.trials) for name, tuned in tuning.optimizers.items()} == {"none": 3, "sam": 3}
    assert [tuned.trials[0].settings for tuned in tuning.optimizers.values()] == [
        {"base.lr": 0.02},
        {"base.lr": 0.02, "optimizer.rho": 0.05},
    ]
    for name, tuned in tuning.optimizers.items():
        complete = [trial for trial in tuned.trials if trial.state == "complete"]
        assert tuning.settings[name] == tuned.best.settings
        assert tuned.best.score == max(trial.score for trial in complete)
        assert all(0.002 <= trial.settings["base.lr"] <= 0.2 for trial in tuned.trials)
    assert tuning.optimizers["sam"].budget["evaluations"] == 2 * tuning.optimizers["sam"].budget["steps"] > 0


def test_scores_are_those_of_runs_that_never_looked_at_a_test_image(found: tuple[Path, Tuning]) -> None:
    _, tuning = found
    for tuned in tuning.optimizers.values():
        for trial in tuned.trials:
            folder = RunFolder(Path(trial.runs[0]))
            config = folder.load_config()
            assert (config.data.evaluate, config.data.validation, config.seed) == ("validation", 0.2, 1000)
            assert config.base.lr == trial.settings["base.lr"]
            assert all(not record["scores"] for record in folder.load_tasks())
            if trial.state == "complete":
                assert trial.score == pytest.approx(folder.load_summary().value("avg", "validation"))


def test_the_file_is_read_back_and_a_finished_search_is_not_repeated(found: tuple[Path, Tuning]) -> None:
    out, tuning = found
    assert read_tuning(out / "tuned.json") == tuning
    values = json.loads((out / "tuned.json").read_text())
    assert (values["protocol"], values["chosen_by"]["images"]) == ("stream", "validation")

    def refuse(jobs: Any) -> Any:
        raise AssertionError("nothing is left to run")

    assert essence(search(out, executor=refuse)) == essence(tuning)
    assert write_search(out, tuning).stat().st_size > 1000


def test_the_choice_is_the_same_whatever_the_test_images_and_labels_are(tmp_path: Path) -> None:
    digits = load_dataset("digits", train_per_class=12, test_per_class=4)

    def arrays(images: Any) -> tuple[np.ndarray, np.ndarray]:
        return images.pixels(range(len(images))).numpy().transpose(0, 2, 3, 1), images.labels

    (x_train, y_train), (x_test, y_test) = arrays(digits.train), arrays(digits.test)
    rng = np.random.default_rng(0)
    chosen = []
    for name, labels, pixels in (
        ("right", y_test, x_test),
        ("permuted", rng.permutation(y_test), x_test),
        ("noise", rng.permutation(y_test), rng.integers(0, 256, x_test.shape, dtype=np.uint8)),
    ):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "own.npz"
        np.savez(path, x_train=x_train, y_train=y_train, x_test=pixels, y_test=labels)
        layer = merge(SMOKE, {"data": {"name": f"npz:{path}"}})
        chosen.append(essence(tune(layer, ["none", "c_flat"], tmp_path / name / "search", trials=2)))
    assert chosen[0] == chosen[1] == chosen[2]


def kill(out: Path, moment: str, chosen: dict[str, Any], **options: Any) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLED, json.dumps(chosen), str(out), moment, json.dumps(options)]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert not (out / "tuned.json").exists()


@pytest.mark.parametrize("moment", ["training", "drawing"])
def test_a_killed_search_resumes_to_the_same_result(moment: str, found: tuple[Path, Tuning], tmp_path: Path) -> None:
    kill(tmp_path / "search", moment, SMOKE, trials=3)
    assert essence(search(tmp_path / "search")) == essence(found[1])


def test_a_kill_before_a_verdict_is_stored_promotes_nobody(tmp_path: Path) -> None:
    ranges = {"base.lr": (0.02, 1e-9)}
    kill(tmp_path, "judging", BEHIND, trials=4, sampler="random", ranges=ranges)
    trials = search(tmp_path, BEHIND, trials=4, sampler="random", ranges=ranges).optimizers["none"].trials
    assert [(trial.state, trial.num_tasks) for trial in trials] == [*[("complete", 2)] * 3, ("pruned", 1)]


def test_more_trials_go_on_from_those_that_are_there(found: tuple[Path, Tuning], tmp_path: Path) -> None:
    few = search(tmp_path, trials=1, sampler="random")
    more = search(tmp_path, trials=2, sampler="random")
    assert [len(tuned.trials) for tuned in more.optimizers.values()] == [2, 2]
    assert essence(few)["sam"] == essence(more)["sam"][:1]
    assert essence(search(tmp_path, trials=1, sampler="random")) == essence(few)


def test_what_is_behind_ends_early(tmp_path: Path) -> None:
    ranges = {"base.lr": (0.02, 1e-9)}
    tuning = tune(BEHIND, ["none"], tmp_path, trials=4, sampler="random", search_seed=0, ranges=ranges)
    trials = tuning.optimizers["none"].trials
    rates = [trial.settings["base.lr"] for trial in trials]
    assert rates == [0.02, 0.02, 0.02, 1e-9]
    assert [(trial.state, trial.num_tasks) for trial in trials] == [*[("complete", 2)] * 3, ("pruned", 1)]
    assert tuning.settings["none"] == {"base.lr": 0.02}
    assert not any((Path(run) / "checkpoints").exists() for trial in trials for run in trial.runs)


def test_a_training_that_diverges_is_a_bad_trial_and_no_end_of_the_search(tmp_path: Path) -> None:
    chosen = merge(SMOKE, {"data": {"train_per_class": 4}, "method": "ranpac"})
    options: dict[str, Any] = {"sampler": "random", "search_seed": 3, "protocol": "first-task"}
    tuning = tune(chosen, ["none"], tmp_path / "a", trials=2, ranges={"base.lr": (0.02, 1e30)}, **options)
    states = [(trial.settings["base.lr"], trial.state) for trial in tuning.optimizers["none"].trials]
    assert states == [(0.02, "complete"), (1e30, "diverged")]
    assert (tuning.settings["none"], tuning.optimizers["none"].budget["diverged"]) == ({"base.lr": 0.02}, 1)
    with pytest.raises(ConfigError, match="Every trial of none has diverged"):
        tune(chosen, ["none"], tmp_path / "b", trials=1, ranges={"base.lr": (1e30, 1e31)}, **options)


def test_an_optimizer_that_always_diverges_has_no_settings_and_the_others_have_theirs(tmp_path: Path) -> None:
    chosen = merge(SMOKE, {"data": {"train_per_class": 4}, "method": "ranpac"})
    tuning = tune(chosen, ["none", "sam:base.lr=1e30"], tmp_path, trials=1, protocol="first-task")
    assert tuning.settings == {"none": {"base.lr": 0.02}}
    assert tuning.diverged.startswith("Every trial of sam:base.lr=1e30 has diverged")
    entries = json.loads((tmp_path / "tuned.json").read_text())["optimizers"]
    assert [entry["settings"] for entry in entries.values()] == [{"base.lr": 0.02}, None]
    assert read_tuning(tmp_path / "tuned.json") == tuning
    assert write_search(tmp_path, tuning).stat().st_size > 1000
    with pytest.raises(ConfigError, match=r"'sam:base.lr=1e30' has no tuned settings"):
        require_tuned(["none", "sam:base.lr=1e30"], tuning)


def test_the_first_task_protocol_judges_by_the_first_task_of_the_same_runs(tmp_path: Path) -> None:
    tuning = tune(SMOKE, ["none"], tmp_path, trials=1, protocol="first-task", seeds=[7, 8])
    trial = tuning.optimizers["none"].trials[0]
    assert (tuning.protocol, trial.num_tasks, len(trial.runs)) == ("first-task", 1, 2)
    config = RunFolder(Path(trial.runs[0])).load_config()
    assert config.stream.max_tasks == 2  # the whole stream's first task, not a stream of one task
    finish_jobs([Job(config, tmp_path / "whole")])
    scores = [RunFolder(Path(run)).load_tasks()[0]["validation"]["logits"]["stage_accuracy"] for run in trial.runs]
    whole = RunFolder(tmp_path / "whole").load_tasks()[0]["validation"]["logits"]["stage_accuracy"]
    assert scores[0] == whole
    assert trial.score == pytest.approx(sum(scores) / 2)


def test_stages() -> None:
    assert stages_of(10, "stream", prune=True) == [3, 6, None]
    assert stages_of(10, "stream", prune=False) == [None]
    assert stages_of(1, "stream", prune=True) == [None]


def test_a_job_that_is_to_come_back_goes_on_later(tmp_path: Path, found: tuple[Path, Tuning]) -> None:
    config = RunFolder(Path(found[1].optimizers["none"].best.runs[0])).load_config()
    first = Job(config, tmp_path / "run", num_tasks=1)
    assert [list(SerialExecutor()([first])), first.is_finished] == [[first], True]
    assert not Job(config, tmp_path / "run").is_finished
    finish_jobs([Job(config, tmp_path / "run")])
    ours, theirs = (
        RunFolder(path).load_summary() for path in (tmp_path / "run", Path(found[1].optimizers["none"].best.runs[0]))
    )
    assert ours.validation == theirs.validation


def test_what_an_entry_sets_is_not_searched_and_ranges_reach_those_that_have_the_key(tmp_path: Path) -> None:
    ranges = dict([parse_range("optimizer.k=2:20"), parse_range("base.lr=0.01:0.03")])
    tuning = tune(SMOKE, ["none", "C-Flat-Turbo:reading=calibrated:rho=0.1"], tmp_path, trials=2, ranges=ranges)
    assert list(read_tuning(tmp_path / "tuned.json").settings) == ["none", "c_flat_turbo:reading=calibrated:rho=0.1"]
    plain, turbo = (tuned.trials[1].settings for tuned in tuning.optimizers.values())
    assert list(plain) == ["base.lr"]
    assert sorted(turbo) == ["base.lr", "optimizer.k"]
    assert isinstance(turbo["optimizer.k"], int)
    assert 0.01 <= turbo["base.lr"] <= 0.03
    config = RunFolder(Path(tuning.optimizers["c_flat_turbo:reading=calibrated:rho=0.1"].best.runs[0])).load_config()
    assert (config.optimizer.settings.reading, config.optimizer.settings.rho) == ("calibrated", 0.1)


def test_another_search_in_the_folder_is_refused(found: tuple[Path, Tuning]) -> None:
    with pytest.raises(DataError, match="another --out"):
        search(found[0], merge(SMOKE, {"train": {"epochs": 2}}))
    with pytest.raises(DataError, match="another --out"):
        search(found[0], metric="last")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"data": {"validation": 0.0}}, {}, "data.validation above 0"),
        ({"data": {"evaluate": "test"}}, {}, "leave data.evaluate out"),
        ({"base": {"first_lr": 0.1}}, {}, "base.first_lr"),
        ({}, {"protocol": "second-task"}, "Unknown protocol 'second-task'"),
        ({}, {"trials": 0}, "trials must be"),
        ({}, {"seeds": [1, 1]}, "seeds must be given once"),
        ({}, {"ranges": {"optimizer.lamb": Interval(low=0.1, high=1.0)}}, "No chosen optimizer searches"),
        ({}, {"ranges": {"train.epochs": Interval(low=2.1, high=2.9)}}, "is a whole number; there is none from 2.1 to"),
    ],
)
def test_wrong_requests_are_one_sentence(change: Any, options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        search(tmp_path, merge(SMOKE, change), **options)


def test_without_optuna_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'cflat\[sweep\]'"):
        search(tmp_path)


@pytest.mark.parametrize(
    "text", ["base.lr", "base.lr=1", "base.lr=0:1", "base.lr=2:1", "base.lr=a:b", "lr=1:2", "a.b=[]"]
)
def test_wrong_ranges_are_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="A range is written as"):
        parse_range(text)


def test_final_runs_take_the_chosen_settings_and_other_seeds(found: tuple[Path, Tuning], tmp_path: Path) -> None:
    _, tuning = found
    with pytest.raises(ConfigError, match="tuned with seed 1000"):
        tuning.check_seeds([0, 1000])
    with pytest.raises(ConfigError, match=r"base\.lr was tuned"):
        tuning.final_layer({"base": {"lr": 0.1}})
    result = compare(tuning.final_layer({}), ["none", "sam"], [0], tmp_path, tuned=tuning.settings)
    assert result.split == "test"
    for row in result.rows:
        config = row.summaries[0].config
        assert config.data.evaluate == "test"
        assert config.base.lr == tuning.settings[str(row.settings["optimizer.name"])]["base.lr"]
        assert not math.isnan(row.spreads["avg"].mean)


def test_the_curve_over_rates_has_a_plateau_for_each_optimizer_and_seed(tmp_path: Path) -> None:
    tuned = {"sam": {"base.lr": 0.5, "optimizer.rho": 0.2}}
    found = rate_curves(SMOKE, ["none", "sam"], tmp_path, rates=[0.1, 0.01], seeds=[1, 2], tuned=tuned)
    values = json.loads((tmp_path / "rates.json").read_text())
    assert values["rates"] == [0.01, 0.1]
    assert values["optimizers"]["sam"]["settings"] == {"optimizer.rho": 0.2}
    config = RunFolder(tmp_path / "rates" / "sam-lr0.1-seed2").load_config()
    assert (config.optimizer.settings.rho, config.base.lr, config.data.evaluate) == (0.2, 0.1, "validation")
    assert [len(curve.by_seed) for curve in found.curves] == [2, 2]
    assert write_curves(tmp_path, found).stat().st_size > 1000


def test_a_curve_of_the_first_task_reads_no_further_in_runs_of_the_whole_stream(tmp_path: Path) -> None:
    rate_curves(SMOKE, ["none"], tmp_path, rates=[0.01, 0.1], seeds=[1])
    found = rate_curves(SMOKE, ["none"], tmp_path, rates=[0.01, 0.1], seeds=[1], protocol="first-task")
    folders = [RunFolder(tmp_path / "rates" / f"none-lr{rate}-seed1") for rate in (0.01, 0.1)]
    first = [folder.load_tasks()[0]["validation"]["logits"]["stage_accuracy"] for folder in folders]
    assert found.curves[0].accuracy == tuple((accuracy,) for accuracy in first)
    folders[0].diverged_file.write_text("{}")  # in the second task, as if the stream had gone on
    assert [validation_score(folders[0], "avg", "logits", stage) for stage in (1, None)] == [first[0], 0.0]


def test_a_plateau_ends_where_accuracy_falls_and_says_when_the_grid_ends_first() -> None:
    rates = [0.001, 0.01, 0.1, 1.0]
    found = plateau(rates, [0.5, 0.9, 0.89, 0.5], within=0.02)
    assert (found.best_rate, found.num_rates, found.is_cut_off) == (0.01, 2, False)
    assert 0.001 < found.low < 0.01 < 0.1 < found.high < 1.0
    assert plateau(rates, [0.9, 0.9, 0.9, 0.9]).decades == pytest.approx(3)
    assert plateau(rates, [0.9, 0.9, 0.9, 0.9]).is_cut_off
    assert plateau(rates, [0.9, 0.5, 0.9, 0.5]).num_rates == 1
