"""The bench from Python: run, load, frames and tables."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cflat
from cflat import CFlatError, ConfigError, DataError
from cflat.cli.main import run_app

SMALL = {"method": "finetune", "data": "digits", "preset": "smoke", "stream": {"initial": 5, "increment": 5}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    cflat.bench.run(**SMALL, out=folder / "plain")
    cflat.bench.run(**SMALL, out=folder / "sam", optimizer={"name": "sam", "rho": np.float64(0.1)}, seed=1)
    return folder


def test_keys_mean_what_they_mean_on_the_command_line(runs: Path) -> None:
    plain = cflat.bench.load_run(runs / "plain")
    sam = cflat.bench.load_run(runs / "sam")
    assert sam.config.optimizer.keywords()["rho"] == 0.1
    assert (plain.config.seed, sam.config.seed) == (0, 1)
    again = cflat.bench.run(**SMALL, train__epochs=2, backbone__image_size=np.int64(8), base={"lr": 0.02})
    assert (again.config.train.epochs, again.config.base.lr, again.config.backbone.image_size) == (2, 0.02, 8)
    assert again.folder is None
    assert again.history() == []
    with pytest.raises(ConfigError, match="with out="):
        again.predictor()


def test_accuracies_are_arrays(runs: Path) -> None:
    run = cflat.bench.load_run(str(runs / "plain"))
    assert run.accuracy.shape == (2, 2)
    assert np.isnan(run.accuracy[0, 1])
    assert run.metrics["last"] == pytest.approx(run.stage_accuracy[-1])
    assert list(run.accuracies) == ["logits"]
    assert [record["event"] for record in run.history()] == ["epoch", "task"] * 2
    assert "finetune on digits with none, seed 0" in repr(run)
    assert len(run.predictor().class_names) == 10


def test_a_run_that_is_there_is_read_when_asked_and_never_overwritten(runs: Path) -> None:
    before = (runs / "plain" / "summary.json").stat().st_mtime_ns
    assert cflat.bench.run(**SMALL, out=runs / "plain", resume=True).metrics["avg"] > 0
    assert (runs / "plain" / "summary.json").stat().st_mtime_ns == before
    with pytest.raises(DataError, match="not empty"):
        cflat.bench.run(**SMALL, out=runs / "plain")
    with pytest.raises(ConfigError, match="another configuration"):
        cflat.bench.run(**SMALL, out=runs / "plain", resume=True, seed=5)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"train__epoch": 3}, "Did you mean 'train.epochs'|epochs"),
        ({"optimizer": "sma"}, "Did you mean 'sam'"),
        ({"tarin": {"epochs": 3}}, "Did you mean 'train'"),
        ({"train__epochs": "many"}, "train.epochs"),
    ],
)
def test_wrong_keys_are_named(keys, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        cflat.bench.run(**{**SMALL, **keys})


def test_frames_have_one_row_for_each_run_and_the_keys_that_differ(runs: Path) -> None:
    frame = cflat.bench.runs_frame(runs).set_index("run")
    assert list(frame.index) == ["plain", "sam"]
    assert frame.loc["sam", "optimizer.rho"] == 0.1
    assert "train.epochs" not in frame.columns
    assert frame.loc["plain", "accuracy"].shape == (2, 2)
    assert frame.loc["plain", "avg"] == cflat.bench.load_run(runs / "plain").metrics["avg"]
    assert frame.loc["sam", "evaluations_per_step"] == 2


def test_frames_keep_unfinished_runs_and_leave_out_broken_ones(
    runs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import shutil

    shutil.copytree(runs, tmp_path / "runs")
    (tmp_path / "runs" / "sam" / "summary.json").unlink()
    frame = cflat.bench.runs_frame(tmp_path / "runs").set_index("run")
    assert not frame.loc["sam", "is_finished"]
    assert np.isnan(frame.loc["sam", "avg"])
    assert len(frame.loc["sam", "stage_accuracy"]) == 2
    (tmp_path / "runs" / "sam" / "config.yaml").write_text("method: [")
    assert set(cflat.bench.runs_frame(tmp_path / "runs")["run"]) == set(frame.index) - {"sam"}
    assert sum("Left out: sam" in record.getMessage() for record in caplog.records) == 1
    with pytest.raises(DataError, match="no run directory"):
        cflat.bench.runs_frame(tmp_path / "nowhere")


def test_frames_say_what_to_install(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(CFlatError, match=r"pip install 'cflat\[frames\]'"):
        cflat.bench.runs_frame(runs)


def test_tables_as_latex_and_csv(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, folder = tmp_path / "page.html", tmp_path / "tables"
    assert run_app(["report", str(runs), "-o", str(page), "--tables", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{name}.{ending}" for name in ("accuracy", "cost", "runs") for ending in ("csv", "tex")
    )
    with (folder / "runs.csv").open() as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    assert float(rows["plain"]["Avg"]) == pytest.approx(
        100 * cflat.bench.load_run(runs / "plain").metrics["avg"], abs=0.005
    )
    text = (folder / "accuracy.tex").read_text()
    assert text.count("{") == text.count("}")
    assert r"\toprule" in text
    assert "±" not in text


def test_importing_cflat_loads_no_bench() -> None:
    code = (
        "import sys, cflat; from cflat import *; "
        "assert not {'numpy.typing', 'timm', 'pandas', 'cflat.bench', 'yaml'} & set(sys.modules), sys.modules; "
        "assert cflat.bench.run and 'cflat.bench' in sys.modules; "
        "assert not hasattr(cflat, 'nothing')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_missing_part_of_the_bench_is_named() -> None:
    code = (
        "import sys; sys.modules['pydantic'] = None\nimport cflat\n"
        "try:\n    cflat.bench\nexcept ModuleNotFoundError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "cflat.bench needs the package 'pydantic'; run: pip install 'cflat[bench]'\n", done.stderr


def test_compare_tune_and_sweep_from_python(tmp_path: Path) -> None:
    tuned = cflat.bench.tune(**SMALL, optimizers=["none", "sam"], trials=2, out=tmp_path / "tune")
    assert set(tuned.settings) == {"none", "sam"}
    result = cflat.bench.compare(**SMALL, optimizers=["none", "sam"], seeds=[0], tuned=tuned, out=tmp_path / "compare")
    assert len(result.rows) == 2
    assert (tmp_path / "compare" / "report.html").is_file()
    grid = {"base": {**SMALL, "optimizer": "sam"}, "axes": {"optimizer.rho": [0.01, 0.1]}, "seeds": [0]}
    assert len(cflat.bench.sweep(grid, tmp_path / "sweep").rows) == 2
    assert len(cflat.bench.runs_frame(tmp_path / "sweep")) == 2
