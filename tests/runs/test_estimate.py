"""What `cflat plan` predicts: counts that are exact, rates that are measured, a formula that can be checked by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cflat.cli.main import run_app
from cflat.config.documents import parse_overrides
from cflat.config.presets import resolve_config
from cflat.config.run_config import RunConfig
from cflat.methods import list_methods
from cflat.runs.estimate import Estimate, Survey, estimate, measured_tasks, predict
from cflat.runs.folder import RunFolder
from cflat.runs.run import run
from cflat.train import OptimizerChoice
from cflat.train.calibrate import PhaseRates, PhaseWork, Rates, Work, expected_evaluations


def config(*overrides: str) -> RunConfig:
    return resolve_config(parse_overrides(["data=digits", "preset=smoke", *overrides]))


def some_of(methods: tuple[str, ...]) -> list:
    """Return all methods, but leave those that grow like one of these to the slow tests."""
    return [name if name in methods else pytest.param(name, marks=pytest.mark.slow) for name in list_methods()]


def times(value: float) -> np.ndarray:
    return np.array([value, 2 * value])


def a_rate(task: int, scale: float = 1.0) -> Rates:
    phase = PhaseRates(times(0.1 * scale), times(0.01), times(0.002), 100.0, 1000.0)
    return Rates(
        task, times(1), times(0.05), times(0.03), times(0.02 * scale), times(0.5), 5000, 10.0, {"train": phase}
    )


def a_work(task: int) -> Work:
    return Work(task, 10, 4, 4 * task, (PhaseWork("train", 2, 6, 40),), 1000 * (task + 1), 7)


def test_the_formula_by_hand() -> None:
    found = predict(Survey([a_work(0), a_work(1)], [a_rate(0), a_rate(1)], [4.0, 4.0], times(3), peak_memory=10**6))
    training = 6 * 0.1 + 2 * 40 * 4 * 0.01 + 40 * 0.002
    task = 1 + 10 * 0.05 + training + 4 * 0.03 + 2 * 0.5
    assert found.seconds == pytest.approx(3 + 2 * task + 4 * 0.02)
    assert found.cpu_seconds == pytest.approx(2 * found.seconds)
    assert (found.steps, found.evaluations, found.flops) == (12, 48, 12 * 100 + 48 * 1000)
    assert (found.state_bytes, found.checkpoint_bytes) == (2000, 5000)


def test_several_ranks_share_images_but_not_borders() -> None:
    one, two = (predict(Survey([a_work(0)], [a_rate(0)], [1.0], times(0)), ranks) for ranks in (1, 2))
    shared = 2 * 40 * 0.01 + 40 * 0.002 + 4 * 0.03 + 10 * 0.05
    assert one.seconds - two.seconds == pytest.approx(shared / 2)


def test_rates_are_interpolated_and_go_on_as_they_grew() -> None:
    works = [a_work(task) for task in range(9)]
    rates = [a_rate(0), a_rate(1, 1.0), a_rate(4, 2.5)]  # grows by half per task from the second on
    found = predict(Survey(works, rates, [1.0] * 9, times(0)))
    fixed = 1 + 0.5 + 2 * 40 * 0.01 + 40 * 0.002 + 4 * 0.03 + 2 * 0.5
    scales = [1.0, *(1 + (task - 1) / 2 for task in range(1, 9))]
    expected = [fixed + scale * (6 * 0.1 + 4 * task * 0.02) for task, scale in enumerate(scales)]
    assert [task.seconds for task in found.tasks] == pytest.approx(expected)
    assert found.checkpoint_bytes == 5000 + 9000 - 5000


def test_a_phase_of_the_first_task_alone_needs_no_rate_of_others() -> None:
    later = Rates(1, times(1), times(0), times(0), times(0), times(0), 0, 0.0, {})
    works = [a_work(0), Work(1, 10, 4, 4, (), 1000, 0)]
    assert predict(Survey(works, [a_rate(0), later], [1.0, 1.0], times(0))).steps == 6


def test_few_tasks_are_measured_of_many() -> None:
    assert measured_tasks(1) == (0,)
    assert measured_tasks(5) == (0, 1, 4)
    assert len(measured_tasks(1000)) == 7


@pytest.mark.parametrize(
    ("name", "settings", "evaluations"),
    [("none", {}, 1), ("sam", {}, 2), ("c_flat", {}, 4), ("looksam", {"k": 5}, 1.2), ("c_flat_turbo", {}, 1.3)],
)
def test_optimizers_take_the_evaluations_that_they_document(name: str, settings: dict, evaluations: float) -> None:
    found = expected_evaluations(OptimizerChoice(name, settings), 100, task=0, num_tasks=2)
    assert found == pytest.approx(evaluations, rel=0.05)


@pytest.mark.parametrize("method", some_of(("duct", "ease", "icarl", "ranpac")))
def test_counts_are_those_of_the_run(method: str, tmp_path) -> None:
    chosen = config(f"method={method}", "optimizer=c_flat", "stream.max_tasks=2", "data.train_per_class=4")
    found = estimate(chosen)
    done = run(chosen, tmp_path / "run")
    assert (found.steps, found.evaluations) == (done.cost.steps, done.cost.evaluations)
    assert found.flops == pytest.approx(done.cost.flops, rel=0.01)
    if done.cost.steps:
        assert found.trainable_parameters == done.cost.trainable_parameters
    files = list(RunFolder(tmp_path / "run").checkpoints.iterdir())
    assert found.checkpoint_bytes == pytest.approx(max(file.stat().st_size for file in files), rel=0.05)
    written = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file())
    assert found.folder_bytes == pytest.approx(written, rel=0.2)


@pytest.mark.parametrize("method", some_of(("ease", "icarl", "memo")))
def test_tasks_that_are_not_measured_are_as_large_as_those_that_are(method: str) -> None:
    """Without time to measure, all but three tasks are passed over, without values: counts and sizes are the same."""
    chosen = config(f"method={method}", "data.train_per_class=2", "stream.initial=1", "stream.increment=1")
    whole, brief = estimate(chosen, budget=1e6), estimate(chosen, budget=0)
    assert (whole.measured_tasks, brief.measured_tasks) == ((0, 1, 4, 9), (0, 1, 4))
    for counted in ("steps", "flops", "trainable_parameters", "state_bytes"):
        assert getattr(brief, counted) == pytest.approx(getattr(whole, counted), rel=0.05)
    # What finish_task of a task adds to its state (RanPAC's Gram matrix) is there after the first one that is measured.
    assert [task.state_bytes for task in brief.tasks] == [task.state_bytes for task in whole.tasks]


def test_the_command_predicts_and_trains_nothing(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["plan", "--method", "icarl", "--data", "digits", "--preset", "smoke", "--optimizer", "c_flat"]
    assert run_app(words) == 0
    text = capsys.readouterr().out
    assert "4.00 per step" in text
    assert text.splitlines()[-1].startswith("Next: cflat run --method icarl --data digits --optimizer c_flat")
    assert run_app([*words, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["evaluations"] == 4 * values["steps"]
    assert not list(tmp_path.iterdir())
    assert run_app([*words, "method.nothing=1"]) == 2


def test_ranks_of_the_plan_need_no_devices() -> None:
    one, eight = (estimate(config("method=finetune", f"runtime.devices={count}")) for count in (1, 8))
    assert isinstance(eight, Estimate)
    assert eight.ranks == 8
    assert eight.steps == one.steps  # which all ranks share
