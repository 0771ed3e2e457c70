"""Run directories: what is written, what is read back, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from cflat import DataError
from cflat._files import write_atomic, write_json
from cflat.config.documents import parse_overrides
from cflat.config.presets import resolve_config
from cflat.metrics import AccuracyMatrix
from cflat.runs.folder import MetricsLog, RunFolder, RunSummary, find_runs
from cflat.train.observer import read_records
from runs import A_COST, an_epoch

CONFIG = resolve_config(parse_overrides(["method=icarl", "data=digits", "preset=smoke", "optimizer=c_flat"]))
KEYS = (
    *("method", "data", "optimizer", "preset", "seed", "scenario", "avg", "last", "forgetting", "accuracy_matrix"),
    *("stage_accuracy", "images_per_second", "evaluations_per_step", "step_seconds", "data_seconds"),
    *("peak_memory_bytes", "trainable_parameters"),
)


def make_summary() -> RunSummary:
    matrix = AccuracyMatrix.start([4, 4]).with_stage([4]).with_stage([2, 3])
    return RunSummary(CONFIG, {"cnn": matrix, "nme": matrix}, A_COST, 1.5, num_classes=4)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    write_atomic(folder.config_file, CONFIG.to_yaml())
    write_json(folder.summary_file, make_summary().to_dict())
    return folder


def test_a_summary_has_the_promised_keys_and_fractions(folder: RunFolder) -> None:
    values = json.loads(folder.summary_file.read_text())
    assert set(KEYS) <= set(values)
    assert values["last"] == 5 / 8
    assert values["accuracy_matrix"] == [[1.0, None], [0.5, 0.75]]
    assert values["optimizer"] == "c_flat"


def test_a_summary_is_read_back_as_it_was(folder: RunFolder) -> None:
    assert folder.load_summary() == make_summary()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"scores": {}}', '{"scores": {"cnn": {"total": [1]}}}', "\x00"]
)
def test_a_broken_summary_is_said_to_be_one(folder: RunFolder, content: str) -> None:
    folder.summary_file.write_text(content)
    with pytest.raises(DataError, match=r"summary\.json"):
        folder.load_summary()


def test_a_foreign_folder_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run directory"):
        RunFolder(tmp_path).load_config()
    (tmp_path / "config.yaml").write_text("lr: 3\n")
    with pytest.raises(DataError, match="not a configuration of this version"):
        RunFolder(tmp_path).load_summary()


def test_an_unfinished_run_says_how_to_go_on(folder: RunFolder) -> None:
    folder.summary_file.unlink()
    with pytest.raises(DataError, match="cflat run --resume"):
        folder.load_summary()


def test_runs_are_found_below_a_folder(folder: RunFolder) -> None:
    assert list(find_runs(folder.path.parent)) == [folder]
    with pytest.raises(DataError, match="no run directory at or below"):
        list(find_runs(folder.path / "absent"))


def test_the_log_is_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    with closing(MetricsLog(tmp_path / "metrics.jsonl")) as first:
        first.on_run_start(2, 0)
        first.on_epoch(an_epoch(epoch=0))
        saved = first.state()
        first.on_epoch(an_epoch(epoch=1))
    with first.path.open("a") as file:
        file.write('{"epoch": 2, "half')
    with closing(MetricsLog(first.path)) as second:
        second.load(saved)
        second.on_run_start(2, 0)
        second.on_epoch(an_epoch(epoch=1, loss=float("nan")))
    records = [json.loads(line) for line in first.path.read_text().splitlines()]
    assert [record["epoch"] for record in records] == [0, 1]
    assert records[1]["loss"] is None
    assert math.isnan(read_records(records)[1].loss)
    assert second.seconds >= saved["seconds"]


def test_a_run_that_starts_anew_starts_its_log_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("old\n")
    with closing(MetricsLog(path)) as log:
        log.on_run_start(2, 0)
    assert path.read_text() == ""


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-1], "not what this run has written"),
        (lambda text: text.replace("7", "8"), "is not what"),
    ],
)
def test_a_log_that_lost_or_changed_lines_is_refused(
    damage: Callable[[str], str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsLog(path)) as log:
        log.on_run_start(2, 0)
        log.on_epoch(an_epoch(epoch=7))
        saved = log.state()
    path.write_text(damage(path.read_text()))
    with closing(MetricsLog(path)) as log:
        log.load(saved)
        with pytest.raises(DataError, match=message):
            log.on_run_start(2, 0)


@pytest.mark.parametrize("event", ["removed", "replaced", "longer"])
def test_nothing_is_saved_beside_a_log_that_is_another(event: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsLog(path)) as log:
        log.on_run_start(2, 0)
        if event == "longer":
            path.write_text("x\n")
        else:
            path.unlink()
            if event == "replaced":
                path.touch()
        with pytest.raises(DataError, match="removed or changed"):
            log.state()
        with pytest.raises(DataError, match="removed or changed"):
            log.on_epoch(an_epoch(epoch=0))


def test_a_log_that_is_a_folder_is_one_sentence(tmp_path: Path) -> None:
    with closing(MetricsLog(tmp_path)) as log, pytest.raises(DataError, match="could not be written"):
        log.on_run_start(2, 0)


def test_a_half_written_line_is_passed_over(folder: RunFolder) -> None:
    folder.metrics_file.write_text('{"epoch": 0}\n{"epo')
    assert folder.load_metrics() == [{"epoch": 0}]
    folder.metrics_file.write_text('{"epo\n{"epoch": 0}\n')
    with pytest.raises(DataError, match="cannot be read"):
        folder.load_metrics()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")

    def fail(file: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match="No space left on device"):
        write_atomic(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
