"""``cflat sweep`` and ``--executor ray``: for people, for scripts, and one sentence for every mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cflat.cli.main import run_app
from processes import processes_in

ROOT = Path(__file__).resolve().parents[2]
SMALL = """
base:
  method: finetune
  data: {name: digits, train_per_class: 4, test_per_class: 4}
  preset: smoke
  stream: {initial: 5, increment: 5}
  runtime: {threads: 1}
axes:
  optimizer.name: [none, sam]
  optimizer.rho: [0.1, 0.5]
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SMALL)


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_app(arguments) == 0
    return capsys.readouterr().out


def test_the_help_shows_examples_and_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, "sweep", "--help")
    assert "Examples:\n    cflat sweep examples/sweep_radius.yaml" in text
    assert "optimizer.rho: [0.02, 0.05, 0.1]" in text


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output_of(capsys, "sweep", str(ROOT / "examples" / "sweep_radius.yaml"), "--json"))
    assert found["out"] == "runs/sweep-radius"
    assert len(found["rows"]) == 4
    assert {row["avg"]["n"] for row in found["rows"]} == {2}
    assert found["rows"][0]["avg"]["mean"] > 0.5
    for name in ("sweep.json", "sweep.csv", "sweep.png", "report.html"):
        assert (Path(found["out"]) / name).stat().st_size > 100


def test_the_table_says_what_was_measured_and_the_command_can_be_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    plan = output_of(capsys, "sweep", "small.yaml", "--dry-run")
    assert plan.splitlines()[:4] == [
        "runs/sweep-small/none-seed0",
        "runs/sweep-small/sam-rho0.1-seed0",
        "runs/sweep-small/sam-rho0.5-seed0",
        "3 runs of 3 combinations; 0 finished",
    ]
    assert not Path("runs").exists()
    assert run_app(["sweep", "small.yaml"]) == 0
    captured = capsys.readouterr()
    assert "sam-rho0.5-seed0: task 2/2" in captured.err
    title, header, *rows = captured.out.splitlines()
    assert title.startswith("small, score logits: mean ± deviation, n = 1 seed, ")
    assert header.split()[:3] == ["optimizer.name", "optimizer.rho", "Avg"]
    assert "accuracies on test images" in title
    assert [row.split()[:2] for row in rows[:3]] == [["none", "-"], ["sam", "0.1"], ["sam", "0.5"]]
    again = output_of(capsys, "sweep", "small.yaml", "--quiet")
    assert again == captured.out
    done = json.loads(output_of(capsys, "sweep", "small.yaml", "--dry-run", "--json"))
    assert (done["num_runs"], done["num_finished"]) == (3, 3)
    assert done["runs"][1]["settings"] == {"optimizer.name": "sam", "optimizer.rho": 0.1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.yaml"], "cannot be read"),
        (["small.yaml", "--executor", "rey"], "Unknown executor 'rey'. Did you mean 'ray'? Known: local, ray."),
        (["small.yaml", "--executor", "ray", "--gpus", "2"], "--gpus must be above 0 and at most 1, got 2.0."),
        (["wrong.yaml"], "Unknown key 'sweep.axis'. Did you mean 'axes'?"),
        (["wrong.yaml", "--dry-run"], "Unknown key 'sweep.axis'."),
        ([], "SWEEP.yaml"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("wrong.yaml").write_text("axis: {}")
    assert run_app(["sweep", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    if captured.err.startswith("cflat:"):
        assert len(captured.err.splitlines()) == 1


def test_without_ray_the_command_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run_app(["sweep", "small.yaml", "--executor", "ray", "--quiet"]) == 2
    assert capsys.readouterr().err == (
        "cflat: The executor 'ray' needs the package ray; run: pip install 'cflat[sweep]'\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_ray_cleanly_and_the_same_command_goes_on(number: signal.Signals, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    endless = SMALL.replace("preset: smoke", "preset: smoke\n  train: {epochs: 100000, checkpoint_minutes: 60}")
    Path("small.yaml").write_text(endless)
    command = [sys.executable, "-m", "cflat", "sweep", "small.yaml", "--executor", "ray"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for turn in (1, 2):
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        metrics = tmp_path / "runs" / "sweep-small" / "none-seed0" / "metrics.jsonl"
        before = metrics.stat().st_size if metrics.exists() else 0
        while not metrics.exists() or metrics.stat().st_size <= before:
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 128 + number, errors
        assert errors.splitlines()[-1] == "Stopped; everything so far is saved. Run the same command again to continue."
        assert "Traceback" not in errors
        assert processes_in(tmp_path) == []
        assert list((metrics.parent / "checkpoints").glob("*.pt")), f"turn {turn} saved nothing"
