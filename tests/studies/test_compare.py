"""Comparisons: pairing, reuse, and the page."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from cflat import ConfigError, DataError
from cflat._files import plain_values
from cflat.cli.main import run_app
from cflat.metrics import paired_difference
from cflat.runs.folder import RunFolder
from cflat.studies.compare import compare, comparison_sweep, comparison_values, write_comparison
from cflat.studies.sweep import SweepResult, plan_sweep
from counting import Counting
from report.pages import Page

TINY = {
    "method": "finetune",
    "data": {"name": "digits", "train_per_class": 4, "test_per_class": 4},
    "preset": "smoke",
    "stream": {"initial": 5, "increment": 5},
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[SweepResult, Path]:
    out = tmp_path_factory.mktemp("compare")
    return compare(TINY, ["none", "sam"], [0, 1], out), out


def test_rows_are_paired_by_seed(compared: tuple[SweepResult, Path]) -> None:
    comparison, out = compared
    last = {
        name: [RunFolder(out / f"{name}-seed{seed}").load_summary().headline.last for seed in (0, 1)]
        for name in ("none", "sam")
    }
    plain, sam = comparison.rows
    expected = paired_difference(last["sam"], last["none"])
    assert asdict(sam.difference(plain, "last")) == pytest.approx(asdict(expected), nan_ok=True)
    values = comparison_values(comparison)
    assert [list(row["differences"]) for row in values["rows"]] == [[], ["avg", "last", "forgetting"]]
    assert plain.spreads["last"].mean == pytest.approx(sum(last["none"]) / 2)
    assert (plain.spreads["evaluations_per_step"].mean, sam.spreads["evaluations_per_step"].mean) == (1, 2)


def test_finished_runs_are_reused(compared: tuple[SweepResult, Path]) -> None:
    comparison, out = compared
    executor = Counting()
    again = compare(TINY, ["none", "sam"], [0, 1], out, executor)
    assert executor.jobs == []
    assert plain_values(comparison_values(again)) == plain_values(comparison_values(comparison))


def test_a_missing_run_alone_is_done_again(compared: tuple[SweepResult, Path]) -> None:
    comparison, out = compared
    (out / "sam-seed1" / "summary.json").unlink()
    executor = Counting()
    again = compare(TINY, ["none", "sam"], [0, 1], out, executor)
    assert [job.out.name for job in executor.jobs] == ["sam-seed1"]
    assert again.rows[1].spreads["last"] == comparison.rows[1].spreads["last"]


def test_another_configuration_is_not_mixed_in(compared: tuple[SweepResult, Path]) -> None:
    _, out = compared
    with pytest.raises(DataError, match="another configuration"):
        compare({**TINY, "train": {"epochs": 2}}, ["none"], [0], out)


def test_shared_settings_go_to_those_that_have_them(tmp_path: Path) -> None:
    planned = plan_sweep(comparison_sweep({**TINY, "optimizer": {"rho": 0.3}}, ["none", "sam"], [0]), tmp_path)
    assert [found.jobs[0].config.optimizer.keywords() for found in planned] == [{}, {"rho": 0.3}]


@pytest.mark.parametrize(
    ("optimizers", "seeds", "message"),
    [
        (["none", "none"], [0], "optimizers"),
        ([], [0], "optimizers"),
        (["none"], [0, 0], "seeds"),
        (["no"], [0], "Unknown"),
    ],
)
def test_wrong_grids_are_refused_before_any_run(
    optimizers: list[str], seeds: list[int], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        compare(TINY, optimizers, seeds, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_wrong_setting_is_named_with_its_optimizer_and_a_wrong_base_without(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^With optimizer.name=sam: optimizer.rho"):
        compare({**TINY, "optimizer": {"rho": -1.0}}, ["none", "sam"], [0], tmp_path / "out")
    with pytest.raises(ConfigError, match=r"^Unknown method"):
        compare({**TINY, "method": "finetun"}, ["none", "sam"], [0], tmp_path / "out")


def test_the_page_holds_everything_it_shows(compared: tuple[SweepResult, Path]) -> None:
    comparison, out = compared
    picture, page = write_comparison(out, comparison)
    assert json.loads((out / "comparison.json").read_text())["reference"] == "none"
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    shown = Page(text)
    assert shown.outside() == []
    assert "sam-seed1" in shown.texts
    assert any(f"{100 * comparison.rows[1].spreads['avg'].mean:.2f}" in part for part in shown.texts)


def test_rows_that_are_equal_are_called_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "--method", "simplecil", "--data", "digits", "--preset", "smoke", "--seeds", "0"]
    assert run_app([*words, "--optimizers", "none,sam", "--out", str(tmp_path), "--quiet"]) == 0
    assert "equal to the last digit" in capsys.readouterr().out
