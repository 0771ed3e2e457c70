"""Trackers: what is passed on, and what is said when one is not installed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from cflat import ConfigError
from cflat.config.documents import flatten, parse_overrides
from cflat.config.presets import resolve_config
from cflat.runs.trackers import TRACKERS, TrackerObserver, track_run
from cflat.train import TaskRecord
from cflat.train.observer import Score
from runs import A_COST, an_epoch

CONFIG = resolve_config(parse_overrides(["method=icarl", "data=digits", "preset=smoke"]))


class ListTracker:
    """A tracker that remembers."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append((step, dict(values)))

    def close(self) -> None:
        pass


def test_numbers_are_passed_on_by_epoch() -> None:
    tracker = ListTracker()
    observer = TrackerObserver(lambda: tracker)
    observer.on_run_start(2, 0)
    observer.on_epoch(an_epoch(loss=0.5))
    observer.load({"step": 7})
    observer.on_task_end(TaskRecord(task=1, name="second", scores={"cnn": Score(0.25, [0.5])}, cost=A_COST))
    (epoch_step, epoch), (task_step, task) = tracker.calls
    assert (epoch_step, epoch["epoch/loss"], epoch["epoch/telemetry.evaluations"]) == (1, 0.5, 8)
    assert "epoch/phase" not in epoch
    assert (task_step, task["task/task"], task["task/scores.cnn.stage_accuracy"]) == (7, 1, 0.25)
    assert task["task/cost.images_per_second"] == 30.0
    assert observer.state() == {"step": 7}


@pytest.mark.parametrize("name", list(TRACKERS))
def test_a_tracker_that_is_not_installed_says_what_to_install(name: str, tmp_path: Path) -> None:
    if find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with pytest.raises(ConfigError, match=r"pip install 'cflat\[track\]'"):
        track_run(name, CONFIG, tmp_path)


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'wandb'"):
        track_run("wandbb", CONFIG, tmp_path)


class Service(ModuleType):
    """A tracking library that notes how it is called, where the real one is not installed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.calls: list[tuple[str, tuple, dict]] = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return call


@pytest.mark.parametrize(
    ("name", "logged", "closed"),
    [
        ("wandb", ("log", ({"task/avg": 0.5},), {"step": 3}), "finish"),
        ("mlflow", ("log_metrics", ({"task/avg": 0.5},), {"step": 3}), "end_run"),
    ],
)
def test_services_get_the_configuration_the_numbers_and_an_end(
    name: str, logged: tuple, closed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(name)
    monkeypatch.setitem(sys.modules, name, service)
    (tmp_path / "run-1").mkdir()
    tracker = track_run(name, CONFIG, tmp_path / "run-1").make()
    tracker.log(3, {"task/avg": 0.5})
    tracker.close()
    opening, (*_, last) = service.calls[:-2], service.calls
    assert service.calls[-2] == logged
    assert last == (closed, (), {})
    given = {key: value for _, _, kwargs in opening for key, value in kwargs.items()}
    if name == "wandb":
        assert (given["name"], given["resume"], given["config"]) == ("run-1", "allow", CONFIG.to_dict())
    else:
        assert given["run_name"] == "run-1"
        assert ("log_params", (flatten(CONFIG.to_dict()),), {}) in opening


def test_a_resumed_run_continues_its_own_curves_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service("wandb")
    monkeypatch.setitem(sys.modules, "wandb", service)
    for folder in ("a", "b", "a"):
        (tmp_path / folder / "run").mkdir(parents=True, exist_ok=True)
        track_run("wandb", CONFIG, tmp_path / folder / "run").make()
    first, other, resumed = (kwargs["id"] for _, _, kwargs in service.calls)
    assert first == resumed != other
