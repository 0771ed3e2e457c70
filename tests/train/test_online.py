"""Online and blurry streams: a batch is seen once, accuracy is measured at any time, kills leave no trace."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

import cflat
from cflat._errors import ConfigError
from cflat.cli.main import app
from cflat.data import build_stream, load_dataset
from cflat.train import Observer, TrainingInterrupted
from methods.streams import domain_stream
from runs import tiny_method, tiny_run

ONLINE = {"preset": "smoke", "stream__online": True, "stream__scenario": "blurry", "train__anytime_every": 20}


class Rows(Observer):
    """Counts how often each image is seen, new or stored."""

    def __init__(self) -> None:
        self.new, self.stored = Counter(), Counter()

    def on_step_start(self, epoch, objective, batch):
        self.new.update(batch.rows.tolist())
        self.stored.update(row for part in batch.replay for row in part.rows.tolist())


@pytest.mark.parametrize("method", ["finetune", "derpp", "er_ace"])
def test_a_batch_is_seen_once_and_only_the_memory_again(method):
    rows = Rows()
    done = cflat.bench.run(method=method, data="digits", observers=[rows], **ONLINE)
    assert set(rows.new.values()) == {1}
    assert len(rows.new) == 80
    assert bool(rows.stored) == (method != "finetune")
    assert len(done.summary.headline.anytime_counts) == 4
    assert 0 <= done.metrics["anytime"] <= 1


def test_methods_that_pass_over_a_task_again_are_rejected():
    with pytest.raises(ConfigError, match="derpp, er_ace, finetune"):
        cflat.bench.run(method="icarl", data="digits", preset="smoke", stream__online=True)
    with pytest.raises(ConfigError, match="every batch once"):
        cflat.bench.run(method="derpp", data="digits", stream__online=True, train__epochs=3)
    with pytest.raises(ConfigError, match=r"base\.ema"):
        cflat.bench.run(method="derpp", data="digits", preset="smoke", stream__online=True, base__ema=0.9)
    with pytest.raises(ConfigError, match="blurry"):
        cflat.bench.run(method="derpp", data="digits", stream__blur=0.3)


def stopping_after(number: int):
    left = iter(range(number))
    return lambda: next(left, None) is None


@pytest.mark.parametrize("number", [3, 17, 31])
def test_stops_leave_no_trace(number: int, tmp_path: Path) -> None:
    from cflat.config.presets import resolve_config
    from cflat.runs.run import run

    given = {"method": "derpp", "data": "digits", "optimizer": "c_flat", "preset": "smoke"}
    train = {"anytime_every": 20, "checkpoint_minutes": 0}
    config = resolve_config({**given, "stream": {"online": True, "scenario": "blurry"}, "train": train})
    whole = run(config, tmp_path / "whole")
    with pytest.raises(TrainingInterrupted):
        run(config, tmp_path / "broken", should_stop=stopping_after(number))
    resumed = run(config, tmp_path / "broken", resume=True)
    assert resumed.accuracy == whole.accuracy
    assert [(tmp_path / name / "metrics.jsonl").read_text().count("\n") for name in ("whole", "broken")] == [10, 10]


def test_from_command_line_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "run --method er_ace --data digits --preset smoke stream.online=true stream.scenario=blurry stream.blur=0.3"
    with pytest.raises(SystemExit) as end:
        app([*words.split(), "train.anytime_every=20", "--out", str(tmp_path / "run"), "--quiet"])
    assert end.value.code in (0, None)
    assert "Anytime" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(summary["scores"]["logits"]["anytime_counts"]) == 4
    with pytest.raises(SystemExit) as end:
        app(["report", str(tmp_path), "-o", str(tmp_path / "report.html")])
    assert end.value.code in (0, None)
    assert "Anytime" in (tmp_path / "report.html").read_text()


def test_forward_transfer_is_the_accuracy_before_learning_above_chance():
    stream = domain_stream()
    result = tiny_run(tiny_method("finetune", stream), stream, epochs=10).accuracy["logits"]
    assert len(result.ahead) == 1
    assert result.forward_transfer == pytest.approx(result.ahead[0] / len(stream.tasks[1].test) - 1 / 6)
    assert result.forward_transfer > 0.2  # the second half of the same digits is known before it is learned


def test_a_blurry_stream_is_learned():
    stream = build_stream(load_dataset("digits", train_per_class=40, test_per_class=10), "blurry", blur=0.5)
    result = tiny_run(tiny_method("er_ace", stream), stream, epochs=3).accuracy["logits"]
    assert result.last > 0.6
