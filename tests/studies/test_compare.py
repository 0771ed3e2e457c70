"""Comparisons: pairing, reuse, and the page."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from cflat import ConfigError, DataError
from cflat.metrics import paired_difference
from cflat.runs.folder import RunFolder
from cflat.studies.compare import Comparison, compare, plan_jobs, write_comparison
from counting import Counting
from report.pages import Page

TINY = {
    "method": "finetune",
    "data": {"name": "digits", "train_per_class": 4, "test_per_class": 4},
    "preset": "smoke",
    "stream": {"initial": 5, "increment": 5},
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path]:
    out = tmp_path_factory.mktemp("compare")
    return compare(TINY, ["none", "sam"], [0, 1], out), out


def test_rows_are_paired_by_seed(compared: tuple[Comparison, Path]) -> None:
    comparison, out = compared
    last = {
        name: [RunFolder(out / f"{name}-seed{seed}").load_summary().headline.last for seed in (0, 1)]
        for name in ("none", "sam")
    }
    plain, sam = comparison.rows
    expected = paired_difference(last["sam"], last["none"])
    assert asdict(sam.differences["last"]) == pytest.approx(asdict(expected), nan_ok=True)
    assert plain.differences == {}
    assert plain.spreads["last"].mean == pytest.approx(sum(last["none"]) / 2)
    assert (plain.spreads["evaluations_per_step"].mean, sam.spreads["evaluations_per_step"].mean) == (1, 2)
    assert json.loads((out / "comparison.json").read_text())["reference"] == "none"


def test_finished_runs_are_reused(compared: tuple[Comparison, Path]) -> None:
    comparison, out = compared
    executor = Counting()
    again = compare(TINY, ["none", "sam"], [0, 1], out, executor)
    assert executor.jobs == []
    assert again.to_dict() == comparison.to_dict()


def test_a_missing_run_alone_is_done_again(compared: tuple[Comparison, Path]) -> None:
    comparison, out = compared
    (out / "sam-seed1" / "summary.json").unlink()
    executor = Counting()
    again = compare(TINY, ["none", "sam"], [0, 1], out, executor)
    assert [job.out.name for job in executor.jobs] == ["sam-seed1"]
    assert again.rows[1].spreads["last"] == comparison.rows[1].spreads["last"]


def test_another_configuration_is_not_mixed_in(compared: tuple[Comparison, Path]) -> None:
    _, out = compared
    with pytest.raises(DataError, match="another configuration"):
        compare({**TINY, "train": {"epochs": 2}}, ["none"], [0], out)


def test_shared_settings_go_to_those_that_have_them(tmp_path: Path) -> None:
    jobs = plan_jobs({**TINY, "optimizer": {"rho": 0.3}}, ["none", "sam"], [0], tmp_path)
    assert [job.config.optimizer.keywords() for job in jobs] == [{}, {"rho": 0.3}]


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


def test_the_page_holds_everything_it_shows(compared: tuple[Comparison, Path]) -> None:
    comparison, out = compared
    picture, page = write_comparison(out, comparison)
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    shown = Page(text)
    assert shown.outside() == []
    assert "sam-seed1" in shown.texts
    assert any(f"{100 * comparison.rows[1].spreads['avg'].mean:.2f}" in part for part in shown.texts)
