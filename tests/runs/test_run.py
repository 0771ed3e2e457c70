"""Runs from a configuration: results, restarts, folders, signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from cflat import ConfigError, DataError
from cflat.config.documents import parse_overrides
from cflat.config.presets import resolve_config
from cflat.config.run_config import RunConfig
from cflat.runs import run as run_module
from cflat.runs.folder import RunFolder
from cflat.runs.interrupts import StopRequest
from cflat.runs.plan import plan_run
from cflat.runs.run import assemble, resume, run
from cflat.train import TrainingInterrupted

SMALL = [
    "method=icarl",
    "data=digits",
    "preset=smoke",
    "optimizer=c_flat_turbo",
    "stream.initial=5",
    "stream.increment=5",
]


def config(*overrides: str) -> RunConfig:
    return resolve_config(parse_overrides([*SMALL, *overrides]))


def without_time(summary: Any) -> dict[str, Any]:
    return json.loads(json.dumps({name: matrix.to_dict() for name, matrix in summary.accuracy.items()}))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "done")
    run(config(), folder.path)
    return folder


def test_a_run_leaves_everything_that_describes_it(finished: RunFolder) -> None:
    assert finished.load_config() == config()
    environment = finished.load_environment()
    assert environment["stream"] == plan_run(config()).stream
    assert {"cflat", "python", "packages", "torch_threads"} <= set(environment)
    events = [record["event"] for record in finished.load_metrics()]
    assert events == ["epoch", "task"] * 2
    assert finished.load_summary().headline.num_stages == 2


def test_a_finished_run_is_read_not_repeated(finished: RunFolder) -> None:
    before = finished.summary_file.stat().st_mtime_ns
    assert without_time(resume(finished.path)) == without_time(finished.load_summary())
    assert finished.summary_file.stat().st_mtime_ns == before


def test_a_stopped_run_goes_on_to_the_same_result(finished: RunFolder, tmp_path: Path) -> None:
    asked = []

    def stop_at_third() -> bool:
        asked.append(None)
        return len(asked) == 3

    with pytest.raises(TrainingInterrupted):
        run(config(), tmp_path / "run", should_stop=stop_at_third)
    assert not RunFolder(tmp_path / "run").is_finished
    again = resume(tmp_path / "run")
    assert without_time(again) == without_time(finished.load_summary())
    assert [r["event"] for r in RunFolder(tmp_path / "run").load_metrics()] == ["epoch", "task"] * 2


def test_a_folder_in_use_is_refused(finished: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not empty"):
        run(config(), finished.path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="is not empty"):
        run(config(), tmp_path / "file")
    with pytest.raises(DataError, match="holds no run to go on with"):
        run(config(), tmp_path / "absent", resume=True)
    with pytest.raises(DataError, match="cannot be made"):
        run(config(), tmp_path / "file" / "run")


def test_what_a_kill_leaves_in_a_new_folder_does_not_block_it(finished: RunFolder, tmp_path: Path) -> None:
    for name in (".probe", ".config.yaml.4711.tmp"):
        (tmp_path / name).touch()
    assert without_time(run(config(), tmp_path)) == without_time(finished.load_summary())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_said_before_training(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DataError, match="cannot be made"):
        run(config(), tmp_path / "run")


def test_a_full_disk_is_said_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(run_module.shutil, "disk_usage", lambda path: full)
    with pytest.raises(DataError, match=r"has 1 MiB left, checkpoints need at least \d+ MiB"):
        run(config(), tmp_path / "run")


def test_changed_data_is_noticed_on_resume(tmp_path: Path) -> None:
    with pytest.raises(TrainingInterrupted):
        run(config(), tmp_path / "run", should_stop=lambda: True)
    with pytest.raises(DataError, match="has changed since it began"):
        run(config("data.subsample_seed=1"), tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("runtime.accelerator=mps", "torch finds no such device"),
        ("runtime.precision=16", "needs a CUDA device"),
        ("backbone={name: 'timm:no_such_model', weights: random}", "no model 'no_such_model'"),
        ("backbone.weights=timm", "no published weights"),
    ],
)
def test_what_only_the_machine_can_tell_is_one_message_too(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        run(config(override), tmp_path / "run")


def test_missing_data_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        run(config(f"data=npz:{tmp_path}/none.npz"), tmp_path / "run")


def test_the_seed_decides_the_first_weights() -> None:
    first, again, other = (assemble(config(f"seed={seed}")).method.state_dict() for seed in (1, 1, 2))
    assert all(first[name].equal(again[name]) for name in first)
    assert any(not first[name].equal(other[name]) for name in first)


def test_a_plan_counts_without_training() -> None:
    plan = plan_run(config("train.epochs=3", "train.first_epochs=2", "train.batch_size=16"))
    assert [task.train_images for task in plan.tasks] == [40, 40]
    assert [task.steps for task in plan.tasks] == [6, 9]
    assert (plan.steps, plan.evaluations) == (15, "1 to 4")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_is_remembered_a_second_one_is_not_caught(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop()
        signal.raise_signal(number)
        assert stop()
        assert stop.exit_code == 128 + number
        assert signal.getsignal(number) is before
    assert signal.getsignal(number) is before
