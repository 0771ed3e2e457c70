"""The command line: every command for people and for scripts, and one sentence for every mistake."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import cflat
from cflat.cli.commands.listing import LISTS
from cflat.cli.main import run_app
from cflat.cli.options import safe_name
from cflat.cli.output import percent
from cflat.cli.progress import RunProgress
from cflat.config.documents import parse_overrides
from cflat.config.presets import resolve_config
from cflat.config.run_config import parse_config
from cflat.data import Task
from cflat.data.images import ImageSet
from cflat.data.pixels import ArrayPixels
from cflat.metrics import Spread
from cflat.runs.folder import RunFolder
from cflat.runs.run import run
from data.test_images import write_image
from processes import Command, interrupted

SMOKE = ["run", "--method", "icarl", "--data", "digits", "--preset", "smoke", "stream.initial=5", "stream.increment=5"]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CFLAT_DATA", raising=False)


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert run_app(arguments) == code
    return capsys.readouterr().out


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict | list:
    return json.loads(output_of(capsys, *arguments, "--json", code=code))


@pytest.mark.parametrize(
    "command", ["", "demo", "run", "compare", "reproduce", "report", "list", "doctor", "check-data"]
)
def test_every_command_shows_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, *command.split(), "--help")
    assert f"Examples:\n    cflat {command}".rstrip() in text


def test_a_run_tells_its_result_and_the_next_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, *SMOKE, "--quiet")
    lines = text.splitlines()
    assert "Avg" in text
    assert "mean over stages" in text
    assert "Results: runs/icarl-digits-none-seed0" in lines
    assert lines[-1].startswith("Next: cflat compare --method icarl")
    again = json_of(capsys, *SMOKE)
    assert again["out"] == "runs/icarl-digits-none-seed0-2"
    assert 0 <= again["last"] <= 1
    resumed = json_of(capsys, "run", "--resume", again["out"])
    assert resumed == again


def test_progress_goes_to_standard_error_in_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(SMOKE) == 0
    captured = capsys.readouterr()
    assert re.search(r"task 2/2 \(\d, \d, \d, \d, \d\): nme", captured.err)
    assert "\x1b" not in captured.err + captured.out
    assert "task 2/2" not in captured.out


def test_the_bar_of_a_terminal_shows_every_task(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich's way to say that this is a terminal
    bar = RunProgress("label")
    run(resolve_config(parse_overrides([*SMOKE[-2:], "method=icarl", "data=digits", "preset=smoke"])), observers=[bar])
    text = capsys.readouterr().err
    assert "label: task 1/2 (classes 0-4): nme" in text  # without a folder nobody knows what the classes are called
    assert re.search(r"label: task 1/2 .*; about \d+ s left", text)
    assert re.search(r"label: task 2/2 \(classes 5-9\): nme .* eval/step", text)
    assert "epoch 1: loss" not in text  # the bar shows the loss


def test_the_bar_of_a_terminal_shows_brackets_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")  # on a dumb one rich draws no bar
    bar, nothing = RunProgress(), ImageSet(ArrayPixels(np.zeros((0, 1, 1, 3), np.uint8)), [])
    bar.on_task_start(Task(0, "[/b]", range(1), nothing, nothing))
    bar.close()
    assert "task 1/1 ([/b]) preparing" in capsys.readouterr().err


def test_lines_of_progress_name_classes_and_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app([*SMOKE, "--out", "told"]) == 0
    lines = capsys.readouterr().err.splitlines()
    names = RunFolder(Path("told")).load_outline().title_of(0)
    assert set(names.split(", ")) <= set("0123456789")
    assert any(line.startswith(f"task 1/2 ({names}): nme ") for line in lines)
    assert re.search(r"task 1/2 epoch 1: loss .*, about \d+ s left", lines[0])


def test_many_runs_are_numbered(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", *SMOKE[1:], "--optimizers", "none,sam", "--seeds", "0", "data.train_per_class=4"]
    assert run_app(arguments) == 0
    told = capsys.readouterr().err
    assert "[1/2] none-seed0: task 1/2" in told
    assert "[2/2] sam-seed0: task 2/2" in told


class Step(NamedTuple):
    task: int
    phase: str
    epoch: int
    step: int
    num_epochs: int = 2
    num_steps: int = 5
    num_tasks: int = 4
    num_images: int = 8
    evaluations: int = 2
    loss: float = 1.0


def test_the_time_left_is_that_of_the_tasks_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("cflat.cli.progress.time.monotonic", lambda: now[0])
    progress = RunProgress()
    progress.on_run_start(num_tasks=4, first_task=2)
    assert (progress.fraction, progress.left) == (0.5, "")
    now[0] = 30.0
    progress.on_step(Step(2, "train", 0, 4))
    assert progress.fraction == 0.625
    assert progress.left == "about 90 s left"  # an eighth took 30 s, three are to come
    progress.on_step(Step(2, "train", 1, 4))
    progress.on_step(Step(2, "merge", 0, 0))
    assert progress.fraction == 0.75  # a second phase does not go back
    progress.on_step(Step(3, "train", 1, 4))
    assert (progress.fraction, progress.left) == (1.0, "")
    progress.close()


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert output_of(capsys, "--version") == f"cflat {cflat.__version__}\n"


def test_alone_list_and_reproduce_say_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert [row["list"] for row in json_of(capsys, "list")] == list(LISTS)
    text = output_of(capsys, "reproduce")
    assert "table11" in text
    assert text.splitlines()[-1] == "Next: cflat reproduce table1 --scale smoke"


@pytest.mark.parametrize("what", ["", *LISTS])
def test_next_commands_of_lists_can_be_pasted(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    last = output_of(capsys, "list", *what.split()).splitlines()[-1]
    _, program, *words = shlex.split(last)
    assert program == "cflat"
    is_long = words[0] in ("run", "reproduce") and "--dry-run" not in words
    output_of(capsys, *words, *(["--dry-run"] if is_long else []))


def test_next_commands_keep_what_was_chosen(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = [*SMOKE, "--dry-run", "--out", "a folder/run", "optimizer=sam", "train.epochs=2", "data.train_per_class=5"]
    wanted = json_of(capsys, *plan)
    _, _, *words = shlex.split(output_of(capsys, *plan).splitlines()[-1])
    assert json_of(capsys, *words, "--dry-run") == wanted
    last = output_of(capsys, *words, "--quiet").splitlines()[-1]
    _, _, *words = shlex.split(last)
    assert words[0] == "compare"
    found = json_of(capsys, *words, "--optimizers", "none,sam", "--seeds", "0", "--out", "compared")
    assert [row["optimizer"] for row in found["rows"]] == ["none", "sam"]
    config = RunFolder(tmp_path / "compared" / "sam-seed0").load_config()
    expected = parse_config({**wanted["config"], "optimizer": config.to_dict()["optimizer"]})
    assert config.identity() == expected.identity()  # compare also measures flatness, which changes no result


def test_what_has_no_settings_is_not_called_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app([*SMOKE, "optimizer.rho=0.1"]) == 2
    assert capsys.readouterr().err == "cflat: Unknown key 'optimizer.rho'. It has no settings at all.\n"


def test_a_plan_names_the_classes(capsys: pytest.CaptureFixture[str]) -> None:
    tasks = json_of(capsys, *SMOKE, "--dry-run")["plan"]["tasks"]
    assert sorted(name for task in tasks for name in task["class_names"]) == list("0123456789")
    assert ", ".join(tasks[0]["class_names"]) in output_of(capsys, *SMOKE, "--dry-run")


def test_a_dry_run_plans_and_does_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = json_of(capsys, *SMOKE, "--dry-run", "train.epochs=2")
    assert plan["config"]["train"]["epochs"] == 2
    assert plan["plan"]["steps"] == sum(task["steps"] for task in plan["plan"]["tasks"])
    text = output_of(capsys, *SMOKE, "--dry-run")
    assert "stream:\n  scenario: class\n" in text
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_file_is_the_lowest_layer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("method: {name: icarl, temperature: 3}\ndata: digits\npreset: smoke\nseed: 4\n")
    plan = json_of(capsys, "run", "-c", "c.yaml", "--seed", "5", "--dry-run", "method.temperature=4")
    assert plan["config"]["method"]["temperature"] == 4
    assert plan["config"]["seed"] == 5
    other = json_of(capsys, "run", "-c", "c.yaml", "--method", "finetune", "--dry-run")
    assert other["config"]["method"]["name"] == "finetune"


def test_a_comparison_prints_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", *SMOKE[1:], "--optimizers", "none,sam", "--seeds", "0,1", "data.train_per_class=4"]
    text = output_of(capsys, *arguments, "--quiet")
    assert "mean ± deviation over 2 seeds" in text
    assert "difference to SGD, score nme, seed by seed" in text
    found = json_of(capsys, *arguments)
    assert [row["optimizer"] for row in found["rows"]] == ["none", "sam"]
    assert found["rows"][1]["evaluations_per_step"]["mean"] == 2


def test_a_table_of_ones_own_is_planned_run_and_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "title: Mine\nsettings: {method: finetune, data: cifar100}\ncolumns: [{name: digits, metrics: [avg]}]\n"
        "rows:\n - {name: plain, settings: {optimizer: none}, published: [[50]]}\n"
        " - {name: +SAM, settings: {optimizer: sam}, published: [[51]]}\n"
    )
    arguments = ["reproduce", str(recipe), "--scale", "smoke", "data.train_per_class=4"]
    assert "2 runs, 0 of them finished." in output_of(capsys, *arguments, "--dry-run")
    text = output_of(capsys, *arguments, "--quiet")
    assert "Avg, paper" in text
    assert "Page:    runs/reproduce/mine-smoke/report.html" in text.splitlines()
    assert "2 runs, 2 of them finished." in output_of(capsys, *arguments, "--dry-run")
    found = json_of(capsys, *arguments)
    assert found["rows"][1]["columns"][0]["entries"][0]["published"] == 51
    planned = json_of(capsys, *arguments, "--dry-run")
    assert [run["is_finished"] for run in planned["runs"]] == [True, True]


@pytest.mark.parametrize("what", list(LISTS))
def test_lists_are_for_people_and_for_scripts(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json_of(capsys, "list", what)
    assert len(rows) >= 4
    text = output_of(capsys, "list", what)
    assert all(str(next(iter(row.values()))) in text for row in rows)
    assert text.splitlines()[-1].startswith("Next: cflat")
    assert "`" not in text


def test_the_help_of_features_names_a_key_that_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(output_of(capsys, "features", "--help").split())
    assert "for example data.train_per_class=50" in text
    assert "train.epochs" not in text


def test_keys_of_one_choice_come_with_their_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["key"]: row for row in json_of(capsys, "list", "keys", "c-flat-turbo")}
    assert rows["optimizer.rho"]["meaning"].startswith("Radius of the neighbourhood")
    assert rows["optimizer.reading"]["default"] == "printed"
    assert all(row["meaning"] for row in rows.values())
    memory = {row["key"]: row for row in json_of(capsys, "list", "keys", "icarl")}
    assert "exemplars" in memory["method.memory_total"]["meaning"].lower()


def test_the_doctor_reports_the_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CFLAT_DATA", "/no/such/folder")
    facts = json_of(capsys, "doctor")
    assert facts["data_root"] == "/no/such/folder (not a folder)"
    assert facts["packages"]["torch"]
    assert list(facts["optional"])[:2] == ["optuna", "ray"]
    assert "free disk" in output_of(capsys, "doctor")


def test_data_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert json_of(capsys, "check-data", "digits")["ok"] is True
    assert "Digits (digits): ok" in output_of(capsys, "check-data", "digits", "--fast")
    report = json_of(capsys, "check-data", "cub200", "--root", "/no/such/folder", code=1)
    assert report["ok"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SMOKE, "optimizer=c_flatt"], "Did you mean 'c_flat'?"),
        ([*SMOKE, "train.epoch=1"], "Did you mean 'epochs'?"),
        ([*SMOKE, "epochs"], "Expected key=value"),
        ([*SMOKE, "--config", "none.yaml"], "cannot be read"),
        ([*SMOKE, "--resume", "runs", "--out", "x"], "leave out --out"),
        ([*SMOKE, "--track", "wandbb"], "Did you mean 'wandb'?"),
        ([*SMOKE, "--out", "/proc/cflat"], "cannot be made"),
        (["run", "--resume", "nowhere"], "is not a run directory"),
        (["run"], "method.name must be given"),
        (["run", "--method", "icarl", "--data", "cub200", "--preset", "smoke"], "needs a data root"),
        (["compare", *SMOKE[1:], "--seeds", "a"], "--seeds must be whole numbers"),
        (["compare", *SMOKE[1:], "--optimizers", "none,none"], "optimizers must be given once each"),
        (["compare", *SMOKE[1:], "--executor", "moon"], "Unknown executor 'moon'"),
        (["reproduce", "tabel1"], "Did you mean 'table1'?"),
        (["reproduce", "table1"], "backbone.weights must be given"),
        (["reproduce", "table1", "--weights", "random"], "needs a data root"),
        (["reproduce", "table1", "--scale", "smok"], "Did you mean 'smoke'?"),
        (["reproduce", "table1", "--rows", "eese"], "Did you mean 'ease'?"),
        (["reproduce", "fig3", "--rows", "ease"], "no rows and columns"),
        (["reproduce", "fig1"], "is a drawing"),
        (["reproduce", "fig5", "--scale", "smoke", "runtime.devices=2"], "runtime.devices=1"),
        (["reproduce", "table1", "--scale", "smoke", "--seeds", "0,0"], "would pretend a spread"),
        (["list", "method"], "Did you mean 'methods'?"),
        (["list", "keys", "icarll"], "Did you mean 'icarl'?"),
        (["list", "methods", "icarl"], "A name goes with keys only"),
        (["check-data", "digit"], "Did you mean 'digits'?"),
        (["run", "--methd", "icarl"], "--methd"),
        (["ran"], "ran"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    if captured.err.startswith("cflat:"):
        assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_and_says_how_to_go_on(number: signal.Signals, tmp_path: Path) -> None:
    arguments = [*SMOKE, "--out", "run", "train.epochs=100000", "train.checkpoint_minutes=60", "runtime.threads=1"]
    command = Command(*arguments, folder=tmp_path)
    assert command.wait_until(lambda: command.log.exists() and "epoch 1:" in command.log.read_text())
    command.signal(number)
    code, output = command.wait()
    assert code == 128 + number
    assert output.splitlines()[-1] == "Stopped; everything so far is saved. Resume it: cflat run --resume run"
    assert list((tmp_path / "run" / "checkpoints").glob("*.pt"))
    assert not RunFolder(tmp_path / "run").is_finished
    again = Command("run", "--resume", "run", "runtime.threads=null", folder=tmp_path)
    assert again.wait_until(lambda: again.log.exists() and "epoch " in again.log.read_text())
    again.signal(number)
    assert again.wait()[1].splitlines()[-1].endswith("Resume it: cflat run --resume run runtime.threads=null")


def test_the_second_interrupt_ends_a_reproduction_that_records_gradients(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual, after_the_first = signal.getsignal(signal.SIGINT), []
    # Called when the first signal is remembered: what does the next one do?
    monkeypatch.setattr(
        "cflat.cli.output.acknowledge_stop", lambda: after_the_first.append(signal.getsignal(signal.SIGINT))
    )
    with interrupted(lambda: any(Path("runs").glob("reproduce/fig3-smoke/runs/*/config.yaml"))):
        assert run_app(["reproduce", "fig3", "--scale", "smoke", "--quiet", "train.epochs=100000"]) == 130
    assert after_the_first == [usual]
    assert "Stopped; everything so far is saved" in capsys.readouterr().err


def test_without_the_bench_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('no typer', name='typer')\n")
    done = subprocess.run(
        [sys.executable, "-m", "cflat", "doctor"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("needs the package 'typer'; run: pip install 'cflat[bench]'")


def test_help_lists_and_typos_need_none_of_the_heavy_parts() -> None:
    """Torch comes with the package itself; images, networks and figures must wait for a command that needs them."""
    heavy = {"timm", "torchvision", "scipy", "matplotlib", "sklearn", "lightning_fabric", "torch._dynamo"}
    code = f"""if True:
        import sys
        from cflat.cli.main import run_app
        codes = [run_app(words.split()) for words in ("--help", "list methods", "run -m icarll -d digits")]
        print(codes, sorted({heavy} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[0, 0, 2] []")


def test_names_and_numbers_are_formatted() -> None:
    assert safe_name("a", "folder:/x/my data") == "a-folder-my-data"
    assert (percent(0.5), percent(float("nan"))) == ("50.00", "-")
    assert Spread(0.5, float("nan"), 1).text(scale=100) == "50.00"


def test_a_broken_image_is_found_before_training_and_the_same_command_then_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split, count in (("train", 4), ("test", 2)):
        for name in ("ant", "bee", "cow", "doe"):
            for index in range(count):
                write_image(tmp_path / "photos" / split / name / f"{index}.png", seed=index)
    broken = tmp_path / "photos" / "test" / "doe" / "1.png"
    whole = broken.read_bytes()
    broken.write_bytes(b"no image")
    command = ["run", "--method", "simplecil", "--data", "folder:photos", "--preset", "smoke", "--quiet"]
    assert run_app(command) == 2
    assert "to see everything: cflat check-data folder:photos" in capsys.readouterr().err
    assert run_app(["check-data", "folder:photos"]) == 1
    broken.write_bytes(whole)
    assert "Results: runs/simplecil-folder-photos-none-seed0\n" in output_of(capsys, *command)
