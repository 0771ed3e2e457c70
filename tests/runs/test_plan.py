"""What `cflat plan` predicts: counts that are exact, rates that are measured, a formula that can be checked by hand."""

from __future__ import annotations

import json

import pytest

from cflat.cli.main import run_app
from cflat.config.documents import parse_overrides
from cflat.config.presets import resolve_config
from cflat.config.run_config import RunConfig
from cflat.methods import list_methods
from cflat.runs import plan
from cflat.runs.folder import RunFolder
from cflat.runs.run import run
from cflat.train import OptimizerChoice


def config(*overrides: str) -> RunConfig:
    return resolve_config(parse_overrides(["data=digits", "preset=smoke", *overrides]))


def some_of(methods: tuple[str, ...]) -> list:
    """Return all methods, but leave those that grow like one of these to the slow tests."""
    return [name if name in methods else pytest.param(name, marks=pytest.mark.slow) for name in list_methods()]


def test_the_formula_by_hand() -> None:
    rate = {"border": 1.0, "pass": 0.05, "first_look": 0.03, "next_look": 0.02, "saving": 0.5, "checkpoint_bytes": 5000}
    own = {"step": 0.1, "evaluation": 0.01, "decoding": 0.002, "flops": 100.0, "evaluation_flops": 1000.0}
    rate |= {"evaluations": 4.0, **{f"train.{name}": value for name, value in own.items()}}
    phase = plan.PhaseCounts("train", epochs=2, steps=6, images=40)
    counts = {"train_images": 10, "new_images": 4, "seen_images": 8, "trainable_parameters": 7, "state_bytes": 1000}
    one, two = (plan.TaskCost(task=1, phases=(phase,), steps=6, **counts) for _ in range(2))
    one.apply(rate, ranks=1)
    two.apply(rate, ranks=2)
    shared = 2 * 40 * 4 * 0.01 + 40 * 0.002 + 10 * 0.05 + 4 * 0.03 + 8 * 0.02
    assert sum(one.seconds.values()) == pytest.approx(1 + 6 * 0.1 + 2 * 0.5 + shared)
    assert sum(two.seconds.values()) == pytest.approx(1 + 6 * 0.1 + 2 * 0.5 + shared / 2)
    assert (one.evaluations, one.flops) == (24, 6 * 100 + 24 * 1000)


def test_rates_lie_on_the_line_through_measured_tasks() -> None:
    rates = {0: {"step": 9.0, "warm": 1.0}, 1: {"step": 1.0}, 5: {"step": 3.0}}
    assert plan.interpolated(rates, 3) == {"step": 2.0, "warm": 1.0}


@pytest.mark.parametrize(
    ("name", "settings", "evaluations"),
    [("none", {}, 1), ("sam", {}, 2), ("c_flat", {}, 4), ("looksam", {"k": 5}, 1.2), ("c_flat_forecast", {}, 1.3)],
)
def test_optimizers_take_the_evaluations_that_they_document(name: str, settings: dict, evaluations: float) -> None:
    found = plan.expected_evaluations(OptimizerChoice(name, settings), 100, task=0, num_tasks=2)
    assert found == pytest.approx(evaluations, rel=0.05)


@pytest.mark.parametrize("method", some_of(("duct", "ease", "icarl", "ranpac")))
def test_counts_are_those_of_the_run(method: str, tmp_path) -> None:
    chosen = config(f"method={method}", "optimizer=c_flat", "stream.max_tasks=2", "data.train_per_class=4")
    found = plan.estimate(chosen)
    done = run(chosen, tmp_path / "run")
    assert (found.steps, found.evaluations) == (done.cost.steps, done.cost.evaluations)
    assert found.flops == pytest.approx(done.cost.flops, rel=0.01)
    if done.cost.steps:
        assert found.trainable_parameters == done.cost.trainable_parameters
    files = list(RunFolder(tmp_path / "run").checkpoints.iterdir())
    assert found.checkpoint_bytes == pytest.approx(max(file.stat().st_size for file in files), rel=0.05)


@pytest.mark.parametrize("method", some_of(("ease", "icarl", "memo")))
def test_counts_of_tasks_that_are_not_measured_are_those_of_the_run(method: str, tmp_path) -> None:
    chosen = config(f"method={method}", "data.train_per_class=2", "stream.initial=1", "stream.increment=1")
    found, done = plan.estimate(chosen), run(chosen, tmp_path / "run")
    assert found.measured_tasks == (0, 1, 9)
    assert (found.steps, found.trainable_parameters) == (done.cost.steps, done.cost.trainable_parameters)
    assert found.flops == pytest.approx(done.cost.flops, rel=0.05)


def test_a_task_without_test_images_is_measured_on_others() -> None:
    """In a blurry stream, a task may bring training images of classes alone whose test images belong to another."""
    chosen = config(
        "method=derpp",
        "stream={scenario: blurry, disjoint: 0, blur: 1}",
        "data.test_per_class=1",
        "stream.order_seed=4",
    )
    assert 0 in [task.test_images for task in plan.plan_run(chosen).tasks]
    assert all(cost.seconds["testing"] > 0 for cost in plan.estimate(chosen).tasks)


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
    one, eight = (plan.estimate(config("method=finetune", f"runtime.devices={count}")) for count in (1, 8))
    assert eight.ranks == 8
    assert eight.steps == one.steps  # which all ranks share
