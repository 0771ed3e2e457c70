"""Wrong input of every kind ends in one sentence with exit code 2; a bug in one with exit code 1 and --debug."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from cflat.cli.main import run_app
from cflat.config.documents import read_document
from cflat.config.yaml_text import MAX_VALUES, dump_yaml, load_yaml

SMOKE = ["run", "--quiet", "--data", "digits", "--preset", "smoke", "stream.max_tasks=1"]
LONG = "x" * 300
BOMB = "a: &a [1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CFLAT_DATA", raising=False)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one sentence that a command is refused with."""
    assert run_app(arguments) == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert len(text) < 4000
    return text


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: *a}", "&a [[*a]]", BOMB, "[" + "1," * MAX_VALUES + "1]"])
def test_documents_that_mean_more_than_they_hold_are_no_yaml(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match=r"contains itself|more than 50,000"):
        load_yaml(text)


def test_scalars_are_those_of_yaml_1_2() -> None:
    text = "[1:2:3, 190:20:30.15, on, off, yes, no, 010, 0o17, 0x1f, 1e-3, .5, 2020-01-01, 1_000, ~, true, .inf]"
    values = ["1:2:3", "190:20:30.15", "on", "off", "yes", "no", 10, 15, 31, 1e-3, 0.5, "2020-01-01", "1_000"]
    assert load_yaml(text) == [*values, None, True, float("inf")]
    assert load_yaml(dump_yaml({"texts": [str(value) for value in values]})) == {"texts": [str(v) for v in values]}


def test_words_for_yes_and_no_are_truth_values_where_those_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app([*SMOKE, "--method", "memo", "method.align=off", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["method"]["align"] is False


def test_a_time_of_day_is_no_number_of_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    assert "train.epochs" in refusal(capsys, *SMOKE, "--method", "finetune", "train.epochs=1:2:3")


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "-c", "in.yaml", "--method", "finetune", "--data", "digits"],
        ["sweep", "in.yaml"],
        ["reproduce", "./in.yaml"],
    ],
)
@pytest.mark.parametrize("content", [BOMB, "a: &a [*a]", "a: " + "x" * (2 << 20), None])
def test_a_hostile_document_is_refused(
    arguments: list[str], content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is None:
        os.mkfifo(tmp_path / "in.yaml")  # opening it would wait for a writer that never comes
    else:
        (tmp_path / "in.yaml").write_text(content)
    assert "in.yaml" in refusal(capsys, *arguments)


def test_a_name_of_a_megabyte_is_not_echoed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(f"method: {'m' * 900_000}\ndata: digits\n")
    assert "mmm ... mmm" in refusal(capsys, "run", "-c", "c.yaml")
    refusal(capsys, "run", f"--{LONG * 400}")
    refusal(capsys, LONG * 400)


@pytest.mark.parametrize(
    "arguments",
    [
        [*SMOKE, "--method", "finetune", "--out", LONG],
        [*SMOKE, "--method", "finetune", "--out", "/proc/x"],
        [*SMOKE, "--method", "finetune", "--weights", LONG],
        ["run", "--method", "finetune", "--data", f"npz:{LONG}", "--preset", "smoke"],
        ["run", "--method", "finetune", "--data", "npz:~nosuchuser/x", "--preset", "smoke"],
        ["run", "--method", "finetune", "--data", "cub200", "--data-root", "~nosuchuser", "--preset", "smoke"],
        ["run", "--resume", LONG],
        ["check-data", f"folder:{LONG}"],
        ["check-data", "npz:~nosuchuser/x"],
        ["report", LONG],
        ["sweep", LONG],
    ],
)
def test_impossible_paths_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        ("l2p", "method.pool_size=2147483647"),
        ("dualprompt", "method.length=2147483647"),
        ("ranpac", "method.num_projections=2147483647"),
        ("ease", "method.bottleneck=2147483647"),
        ("finetune", "backbone.image_size=8192"),
    ],
)
def test_what_no_machine_can_hold_is_refused_before_it_is_allocated(
    method: str, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refusal(capsys, *SMOKE, "--method", method, setting)
    assert re.search(r"needs at least [\d.]+ GiB of memory", text)
    assert "error.log" not in text  # it did not come as far as the training


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("ranpac", ["base.lr=1e10"]),  # the eigenvalues of features that are NaN
        ("finetune", ["base.name=adam", "base.lr=1e300"]),  # no float
    ],
)
def test_divergence_names_the_learning_rate_and_the_log(
    method: str, settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refusal(capsys, *SMOKE, "--method", method, "--out", "out", *settings)
    assert f"Lower base.lr, now {float(settings[-1].split('=')[1]):g}" in text
    assert "Details: out/error.log" in text
    assert "Traceback" in (tmp_path / "out" / "error.log").read_text()


def test_steps_that_were_given_up_are_told(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert run_app([*SMOKE, "--method", "finetune", "base.lr=1e30", "train.epochs=6"]) == 0
    assert any("Lower base.lr" in record.getMessage() for record in caplog.records)


def test_debug_shows_where_an_error_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app([*SMOKE, "--method", "finetune", "--weights", "absent", "--debug"]) == 2
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert "No weights file at absent" in text.splitlines()[-1]


def test_text_files_are_regular_and_of_bounded_size(tmp_path: Path) -> None:
    from cflat._files import read_text

    (tmp_path / "text").write_text("abc")
    assert read_text(tmp_path / "text", 3) == "abc"
    with pytest.raises(OSError, match="larger"):
        read_text(tmp_path / "text", 2)
    with pytest.raises(OSError, match="not a regular file"):
        read_text(tmp_path)
    assert read_document(_written(tmp_path / "c.yaml", "seed: 3")) == {"seed": 3}


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
