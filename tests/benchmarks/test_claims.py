"""Verdicts follow their rules: gains, losses, margins, and nothing without runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import claims
from front_tables import collect

sys.path.pop(0)  # benchmarks/data.py would hide the folder tests/data


def effect(mean: float, half: float) -> claims.Effect:
    return claims.Effect("stream", "a - b", mean, half, seeds=8, evaluations=1.3)


HOLDS, FAILS, OPEN = claims.HOLDS, claims.FAILS, claims.UNTESTED


@pytest.mark.parametrize(
    ("effects", "better", "as_good", "no_gain"),
    [
        ([(1.0, 0.5)], HOLDS, HOLDS, FAILS),
        ([(1.0, 0.5), (0.1, 0.5)], HOLDS, HOLDS, FAILS),
        ([(1.0, 0.5), (-1.0, 0.5)], FAILS, FAILS, FAILS),
        ([(0.1, 0.5)], OPEN, HOLDS, HOLDS),
        ([(0.5, 2.0)], OPEN, OPEN, OPEN),
        ([(-0.6, 0.3)], FAILS, HOLDS, HOLDS),
        ([(0.6, 0.3)], HOLDS, HOLDS, HOLDS),
        ([(0.6, 0.5), *[(0.0, 0.5)] * 9], OPEN, HOLDS, FAILS),  # one of ten by luck
        ([], OPEN, OPEN, OPEN),
    ],
)
def test_rules(effects: list[tuple[float, float]], better: str, as_good: str, no_gain: str) -> None:
    found = [effect(*pair) for pair in effects]
    assert claims.better(found).verdict == better
    assert claims.as_good(found).verdict == as_good
    assert claims.no_gain(found).verdict == no_gain


def test_every_claim_has_a_page_even_before_any_run(tmp_path: Path) -> None:
    runs = claims.Runs(collect(tmp_path))
    for claim in claims.CLAIMS.values():
        finding = claim.judge(runs)
        assert finding.verdict == claims.UNTESTED or claim is claims.CLAIMS["memory"]
        text = claims.page(claim, finding)
        assert text.startswith(f"# {claim.title}\n\n**Verdict: {finding.verdict}.**")


def test_numbers_on_a_page_are_those_of_the_runs(tmp_path: Path) -> None:
    for name, shift in (("none", 0.0), ("c_flat", -0.02), ("turbo", 0.02)):
        values = [0.8 + shift, 0.82 + shift, 0.85 + 1.5 * shift]
        result = dict.fromkeys(("avg", "last"), values)
        folder = tmp_path / "digits-class" / name
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps({**result, "evaluations_per_step": [1.3] * 3}))
    runs = claims.Runs(collect(tmp_path))
    gain = claims.CLAIMS["turbo-gains"].judge(runs)
    assert gain.verdict == claims.HOLDS
    assert gain.rows[0][1:] == ["C-Flat Turbo - SGD, Avg", "+2.33 ± 1.43 points", "3", "1.30"]
    assert claims.CLAIMS["c-flat-gains"].judge(runs).verdict == claims.FAILS
    assert claims.CLAIMS["turbo-as-good"].judge(runs).verdict == claims.HOLDS


def test_ablations_and_watched_runs_are_judged_by_their_own_numbers(tmp_path: Path) -> None:
    entry = {"avg": [0.80, 0.81, 0.82], "last": [0.7] * 3, "evaluations_per_step": [1.1] * 3}
    dear = {**entry, "evaluations_per_step": [2.2] * 3}
    worse = {**entry, "avg": [0.70, 0.72, 0.71]}
    folder = tmp_path / "digits-class" / "turbo-paper"
    folder.mkdir(parents=True)
    conditions = {"tuned": entry, "no trigger": dear, "no schedule": entry, "beta 0.8": entry, "beta 0.2": worse}
    (folder / "ablations.json").write_text(json.dumps({**conditions, "beta 0.4": worse}))
    runs = claims.Runs(collect(tmp_path))
    assert claims.CLAIMS["trigger"].judge(runs).verdict == claims.HOLDS
    assert claims.CLAIMS["scheduler"].judge(runs).verdict == claims.FAILS  # it saves nothing
    beta = claims.CLAIMS["beta"].judge(runs)
    assert beta.verdict == claims.FAILS
    assert len(beta.rows) == 1  # 0.2 lies outside the range of the claim


def test_published_pages_are_those_of_the_published_ledger() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    runs = claims.Runs(
        json.loads((docs / "results/front/front.json").read_text()),
        json.loads((docs / "figures/convergence.json").read_text()),
    )
    findings = {name: claim.judge(runs) for name, claim in claims.CLAIMS.items()}
    for name, finding in findings.items():
        assert (docs / f"results/claims/{name}.md").read_text() == claims.page(claims.CLAIMS[name], finding), name
    assert (docs / "results/claims/index.md").read_text() == claims.overview(findings, runs.streams)


def test_the_readme_counts_the_verdicts_that_are_there() -> None:
    root = Path(__file__).resolve().parents[2]
    verdicts = json.loads((root / "docs/results/claims/verdicts.json").read_text())
    assert verdicts.keys() == claims.CLAIMS.keys()
    found = [entry["verdict"] for entry in verdicts.values()]
    holds, fails, is_open = (found.count(verdict) for verdict in (HOLDS, FAILS, OPEN))
    expected = f"{holds} hold here, {fails} do not, and {is_open} cannot be decided"
    assert f"Of {len(found)} claims" in (root / "README.md").read_text()
    assert expected in (root / "README.md").read_text()
    assert expected in (root / "docs/results/claims/index.md").read_text()
