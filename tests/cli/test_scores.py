"""Scores have names, from the run to the LaTeX table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cflat.cli.main import run_app
from cflat.methods import get_method_spec
from cflat.runs.folder import RunFolder

CHOICE = ["--method", "icarl", "--data", "digits", "--preset", "smoke"]
SMALL = ["stream.max_tasks=2", "runtime.threads=1", "train.flatness=false"]


def test_the_headline_is_the_score_that_the_methods_paper_reports() -> None:
    headlines = {"icarl": "nme", "memo": "cnn", "l2p": "instancewise", "dualprompt": "instancewise", "ease": "logits"}
    for method, score in headlines.items():
        assert get_method_spec(method).score(None) == score


def test_a_score_goes_from_the_comparison_to_latex(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    compare = ["compare", *CHOICE, "--optimizers", "none", "--seeds", "0", "--out", str(runs), *SMALL]
    assert run_app([*compare, "--score", "cnn", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    summary = RunFolder(next(runs.glob("*seed0"))).load_summary()
    assert (values["score"], summary.score) == ("cnn", "nme")  # a run keeps its headline, whoever looks at it
    row = values["rows"][0]
    assert row["avg"]["mean"] == pytest.approx(summary.accuracy["cnn"].avg)
    assert row["avg@nme"]["mean"] == pytest.approx(summary.accuracy["nme"].avg)

    assert run_app([*compare, "--quiet"]) == 0  # nothing is trained again
    said = capsys.readouterr().out
    assert "score nme" in said
    assert "Avg, cnn" in said

    tables = tmp_path / "tables"
    report = ["report", str(runs), "-o", str(tmp_path / "page.html"), "--tables", str(tables), "--score"]
    assert run_app([*report, "cnn"]) == 0
    latex = (tables / "accuracy.tex").read_text(encoding="utf-8")
    assert "runs & score & seeds & Avg & Last & Forgetting & Avg, nme & Last, nme" in latex
    assert f"& cnn & 1 & {100 * summary.accuracy['cnn'].avg:.2f}" in latex
    assert "Score: cnn." in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "(cnn)" in capsys.readouterr().out
    assert run_app([*report, "nmee"]) == 2
    assert "Did you mean 'nme'" in capsys.readouterr().err


def test_a_score_that_the_method_has_not_is_rejected_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("run", "compare", "tune"):
        assert run_app([command, *CHOICE, "--score", "logits"]) == 2
        assert "Unknown score of icarl 'logits'" in capsys.readouterr().err
