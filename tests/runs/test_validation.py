"""Runs that keep validation images aside: what they report, and what they never look at."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cflat._errors import ConfigError
from cflat.config.presets import resolve_config
from cflat.data import ImageSet
from cflat.runs.folder import RunFolder
from cflat.runs.run import run
from cflat.train import TrainingInterrupted

SMOKE = {"method": "replay", "data": {"name": "digits", "validation": 0.2}, "preset": "smoke"}


def config(**data):
    return resolve_config({**SMOKE, "data": {**SMOKE["data"], **data}, "stream": {"max_tasks": 2}})


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "both"
    run(config(), folder)
    return RunFolder(folder)


def test_test_and_validation_accuracies_have_names_of_their_own(both):
    values = json.loads(both.summary_file.read_text())
    summary = both.load_summary()
    assert values["avg"] == summary.value("avg", "test") == summary.value("avg")
    assert values["validation"]["avg"] == summary.value("avg", "validation")
    assert {"avg", "last", "forgetting", "accuracy_matrix"} <= values["validation"].keys()
    assert summary.on("validation").total.tolist() == [57, 58]
    assert summary.on("test").total.tolist() == [8, 8]
    tasks = [record for record in both.load_metrics() if record["event"] == "task"]
    stages = [record["validation"]["logits"]["stage_accuracy"] for record in tasks]
    assert stages == values["validation"]["stage_accuracy"]


def test_a_run_on_validation_images_learns_the_same_and_never_reads_a_test_image(both, tmp_path, monkeypatch):
    read = set()
    parts = ImageSet.pixel_parts

    def spy(images, indices, *decoded):
        read.add(id(images.store))
        return parts(images, indices, *decoded)

    monkeypatch.setattr(ImageSet, "pixel_parts", spy)
    summary = run(config(evaluate="validation"), tmp_path / "run")
    assert len(read) == 1  # training and validation images share a store, test images have their own
    assert summary.split == "validation"
    assert summary.value("avg") == both.load_summary().value("avg", "validation")
    values = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert values["avg"] is values["last"] is values["forgetting"] is None
    again = RunFolder(tmp_path / "run").load_summary()
    assert (again.split, again.value("last")) == ("validation", summary.value("last"))


def test_testing_alone_gives_the_same_as_with_validation(both, tmp_path):
    values = run(config(evaluate="test")).to_dict()
    assert "validation" not in values
    assert values["accuracy_matrix"][1] == both.load_summary().to_dict()["accuracy_matrix"][1]


@pytest.mark.parametrize("stop_at", [1, 2])
def test_an_interrupted_run_goes_on_to_the_same_validation_accuracy(both, tmp_path: Path, stop_at: int):
    asked = iter(range(1, 100))
    with pytest.raises(TrainingInterrupted):
        run(config(), tmp_path / "run", should_stop=lambda: next(asked) >= stop_at)
    summary = run(config(), tmp_path / "run", resume=True)
    assert summary.validation == both.load_summary().validation
    assert summary.accuracy == both.load_summary().accuracy


def test_a_run_that_came_back_early_goes_on_to_the_same_result(both, tmp_path: Path):
    first = run(config(), tmp_path / "run", num_tasks=1)
    assert first.on("validation").num_stages == 1
    assert not RunFolder(tmp_path / "run").is_finished
    assert run(config(), tmp_path / "run", resume=True).validation == both.load_summary().validation


def test_noise_changes_what_is_learned_from_alone():
    clean, noisy = run(config()), run(config(label_noise=0.4))
    assert clean.validation["logits"].total.tolist() == noisy.validation["logits"].total.tolist()
    assert not np.array_equal(clean.validation["logits"].correct, noisy.validation["logits"].correct)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"validation": 0.0, "evaluate": "validation"}, "data.evaluate=validation needs images that are kept aside"),
        ({"validation": 0.0, "validation_per_class": 3}, "data.validation_per_class needs images"),
        ({"validation": 1.0}, "data.validation must be"),
        ({"label_noise": -0.1}, "data.label_noise must be"),
        ({"evaluate": "train"}, "data.evaluate must be"),
    ],
)
def test_what_cannot_be_is_said_before_training(data, message):
    with pytest.raises(ConfigError, match=message):
        config(**data)
