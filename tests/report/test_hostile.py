"""What a report finds in the folders it scans can be anything; the rest of the page is made all the same."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from cflat.cli.main import run_app

DIGITS = 10**400
"""An integer that no float can hold."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    tiny = ["--preset", "smoke", "--quiet", "data.train_per_class=2", "data.test_per_class=1", "stream.max_tasks=1"]
    assert run_app(["run", "--method", "finetune", "--data", "digits", "--out", str(folder), *tiny]) == 0
    return folder


@pytest.fixture
def runs(finished: Path, tmp_path: Path) -> Path:
    for name in ("good", "odd"):
        shutil.copytree(finished, tmp_path / "runs" / name)
    (tmp_path / "runs" / "odd" / "analysis").mkdir()
    return tmp_path / "runs"


def problems(runs: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Make the page; return what was left out."""
    capsys.readouterr()
    assert run_app(["report", str(runs), "-o", str(runs / "page.html")]) == 0
    text = capsys.readouterr().err
    assert len(text) < 10_000
    return text


@pytest.mark.parametrize("key", ["seconds", "cost", "scores", "avg"])
def test_a_number_of_400_digits(key: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = runs / "odd" / "summary.json"
    summary = json.loads(file.read_text())
    if key == "cost":
        summary["cost"] = dict.fromkeys(summary["cost"], DIGITS)
    elif key == "scores":
        summary["scores"]["logits"]["total"] = [DIGITS]
    else:
        summary[key] = DIGITS
    file.write_text(json.dumps(summary))
    text = problems(runs, capsys)
    assert key == "avg" or "odd" in text  # the page computes the average anew


@pytest.mark.parametrize("name", ["env.json", "metrics.jsonl", "summary.json", "config.yaml", "analysis/f.json"])
def test_pipes_do_not_block(name: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "odd" / name).unlink(missing_ok=True)
    os.mkfifo(runs / "odd" / name)
    problems(runs, capsys)


@pytest.mark.parametrize("name", ["env.json", "metrics.jsonl", "summary.json", "analysis/f.json"])
@pytest.mark.parametrize("content", ["[" * 100_000 + "\n", "\udcff\n", "9" * 5000 + "\n", '{"a": NaN}\n'])
def test_texts_that_are_no_records(name: str, content: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "odd" / name).write_text(content, errors="surrogateescape")
    assert "odd" in problems(runs, capsys) or name == "env.json"


def test_a_name_of_half_a_megabyte_is_cut(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "odd" / "config.yaml").write_text(f"method: {'m' * 500_000}\n")
    assert "m ... m" in problems(runs, capsys)
