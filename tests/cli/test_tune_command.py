"""``cflat tune`` and ``cflat compare --tuned``: for people, for scripts, and one sentence for every mistake."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cflat.cli.main import run_app

TINY = [
    *("--method", "finetune", "--data", "digits", "--preset", "smoke", "--quiet"),
    *("data.train_per_class=4", "data.test_per_class=4", "data.validation_per_class=4", "runtime.threads=1"),
    *("stream.initial=5", "stream.increment=5"),
]
OPTIMIZERS = "none,sam,c_flat,c_flat_turbo:reading=printed"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_search_ends_with_settings_budget_picture_and_the_command_of_the_final_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_app(["tune", *TINY, "--optimizers", OPTIMIZERS, "--trials", "1"]) == 0
    text = capsys.readouterr().out
    title, header, *rows = text.splitlines()
    assert "chosen by avg (score logits) on validation images, protocol stream" in title
    assert header.split()[:3] == ["optimizer", "base.lr", "optimizer.rho"]
    titles = ["SGD", "SAM", "C-Flat", "C-Flat Turbo, reading=printed"]
    assert [row.split("  ")[0].strip() for row in rows[:4]] == titles
    assert "no test image was looked at" in text
    folder = Path("runs/tune-finetune-digits")
    assert (folder / "search.png").stat().st_size > 1000
    command = text.splitlines()[-1].removeprefix("Next: ")
    assert command == f"cflat compare --tuned {folder}/tuned.json --seeds 0,1,2,3,4"
    words = [*command.split()[1:-1], "0", "--optimizers", "none,c_flat_turbo:reading=printed", "--json"]
    assert run_app(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["out"], found["images"]) == ("runs/compare-tuned-finetune-digits", "test")
    assert [(row["optimizer"], list(row["tuned"])) for row in found["rows"]] == [
        ("none", ["base.lr"]),
        ("c_flat_turbo:reading=printed", ["base.lr", "optimizer.rho"]),
    ]
    page = Path(found["page"]).read_text()
    assert "No two of these" not in page


def test_the_table_names_an_optimizer_that_always_diverged(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--optimizers", "none,sam:base.lr=1e30", "--trials", "1", "--protocol", "first-task"]
    assert run_app(["tune", *TINY, "--method", "ranpac", *options]) == 0
    text = capsys.readouterr().out
    assert "Every trial of sam:base.lr=1e30 has diverged" in text
    (row,) = [line for line in text.splitlines() if line.startswith("SAM, base.lr=1e30")]
    assert row.split()[2:4] == ["-", "-"]  # neither a rate nor an accuracy


def test_the_next_command_can_be_pasted_whatever_the_folder_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--optimizers",
        "none",
        "--protocol",
        "first-task",
        "--curve",
        "--rates",
        "0.01,0.1",
        "--out",
        "my curve",
    ]
    assert run_app(["tune", *TINY, *options]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Next: python -m webbrowser -t 'my curve/rates.png'"


def test_scripts_get_one_object_and_the_curve_its_plateaus(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--optimizers", "none", "--protocol", "first-task", "--json"]
    assert run_app(["tune", *TINY, *options, "--trials", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["protocol"], list(found["optimizers"]["none"]["settings"])) == ("first-task", ["base.lr"])
    assert found["next"].startswith("cflat compare --tuned ")
    assert run_app(["tune", *TINY, *options, "--curve", "--rates", "0.01,0.1"]) == 0
    curve = json.loads(capsys.readouterr().out)
    assert curve["rates"] == [0.01, 0.1]
    assert curve["optimizers"]["none"]["plateau"]["num_rates"] >= 1
    assert Path(curve["figure"]).is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--protocol", "last-task"], "Unknown protocol 'last-task'. Did you mean 'first-task'?"),
        (["--range", "base.lr=fast"], "A range is written as"),
        (["--optimizers", "none,sma"], "Did you mean 'sam'"),
        (["--optimizers", "sam:roh=1"], "Did you mean 'rho'"),
        (["--curve", "--rates", "fast"], "--rates must be numbers"),
        (["--seeds", "x"], "--seeds must be whole numbers"),
        (["data.validation=0"], "set data.validation above 0"),
        (["--rates", "0.1,0.2"], "--rates is for --curve"),
        (["--curve", "--range", "base.lr=0.1:0.2"], "searches nothing; leave out --range"),
        (["--curve", "--no-prune", "--trials", "8"], "leave out --trials, --no-prune"),
        (["--curve", "--search-seed", "0", "--sampler", "tpe"], "leave out --sampler, --search-seed"),
        (["--search-seed=-1"], "search_seed must be a whole number from 0"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["tune", *TINY, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_settings_must_be_those_of_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.json").write_text('{"optimizers": {}}')
    Path("deep.json").write_text("[" * 100_000)
    os.mkfifo("pipe.json")  # opening it would wait for a writer that never comes
    unreadable, foreign = "cannot be read", "was not written by cflat tune"
    for file, message in {
        "absent.json": unreadable,
        "pipe.json": unreadable,
        "deep.json": foreign,
        "other.json": foreign,
    }.items():
        assert run_app(["compare", "--tuned", file]) == 2
        assert message in capsys.readouterr().err
