"""Real `cflat run`s on several ranks: kills, stops, ranks that end or stall, and what torchrun prints."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from processes import Command, Ranks
from train.test_kill import arguments, assert_same_run, newest

NUM_KILLS = 10
SHORT = "stream.max_tasks=2"
DOUBLE = """\
import torch
from cflat.data import transforms

torch.set_default_dtype(torch.float64)
transforms.unit_range = lambda images: images.double().div_(255)
"""
"""A plug-in: in single precision, another last bit of one weight is enough to end with other accuracies."""


def start(out: Path, num_ranks: int = 2, *more: str) -> Ranks:
    is_begun = (out / "config.yaml").exists()
    words = ("run", "--resume", out, "--quiet") if is_begun else (*arguments("icarl", "class", out), *more)
    return Ranks(num_ranks, *words, folder=out.parent)


def kill_after_progress(out: Path, chooser: random.Random, *more: str) -> bool:
    """Begin or go on with a run and kill all its ranks soon after a new checkpoint; False if it ended before."""
    seen = newest(out)
    ranks = start(out, 2, *more)
    is_time = ranks.wait_until(lambda: newest(out) != seen)
    time.sleep(chooser.uniform(0, 0.05))
    was_alive = is_time and ranks.is_alive
    ranks.kill()
    return was_alive


def undisturbed(out: Path, *more: str) -> Path:
    """Return a run on two ranks that nobody disturbed."""
    codes, output = start(out, 2, *more).wait()
    assert codes == [0, 0], output
    return out


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(tmp_path_factory.mktemp("whole") / "run", SHORT)


def test_two_ranks_are_one_training(whole: Path) -> None:
    tasks = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines() if '"task"' in line]
    assert [record["task"] for record in tasks if record["event"] == "task"] == [0, 1]
    assert json.loads((whole / "summary.json").read_text())["num_tasks"] == 2
    assert sorted(path.name for path in whole.parent.iterdir() if path.is_dir()) == ["run"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["icarl", "memo"])
def test_with_batchnorm_any_number_of_ranks_ends_with_the_same_accuracies(method: str, tmp_path: Path) -> None:
    """Batches of 14 images and a last one of 4; batches of 3, which leave one of four ranks without an image."""
    plugin = tmp_path / "double.py"
    plugin.write_text(DOUBLE)
    # Batches of three images amplify rounding so much that in the second task double precision is not enough either.
    for batch_size, *length in ((14, "train.epochs=2", SHORT), (3, "train.epochs=1", "stream.max_tasks=1")):
        words = ("--plugin", plugin, "backbone.name=resnet8", f"train.batch_size={batch_size}", *length)
        outs = {number: tmp_path / f"{batch_size}-{number}" for number in (0, 1, 2, 4)}
        for number, out in outs.items():
            run = (*arguments(method, "class", out), *words)
            if number == 0:  # without torchrun
                code, output = Command(*run, folder=tmp_path).wait()
                assert code == 0, output
            else:
                codes, output = Ranks(number, *run, folder=tmp_path).wait()
                assert codes == [0] * number, output
        for number in (1, 2, 4):
            assert_same_learning(outs[0], outs[number])


def assert_same_learning(alone: Path, together: Path) -> None:
    """One set of files, the same counts of right answers, and losses to rounding."""
    names = [sorted(path.name for path in run.iterdir()) for run in (alone, together)]
    assert names[0] == names[1]
    expected, got = (json.loads((run / "summary.json").read_text()) for run in (alone, together))
    assert got["accuracy_matrix"] == expected["accuracy_matrix"]
    for key in ("steps", "images", "evaluations"):
        assert got["cost"][key] == expected["cost"][key]
    records = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (alone, together)
    ]
    assert [record["event"] for record in records[1]] == [record["event"] for record in records[0]]
    losses = [[record["loss"] for record in run if "loss" in record] for run in records]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def kill_again_and_again(num_kills: int, broken: Path, *more: str) -> None:
    chooser = random.Random(num_kills)
    for kills in range(num_kills):
        assert kill_after_progress(broken, chooser, *more), f"the run ended after {kills} kills; make it longer"
    codes, output = start(broken).wait()
    assert codes == [0, 0], output


def test_kills_of_two_ranks_leave_no_trace(whole: Path, tmp_path: Path) -> None:
    kill_again_and_again(2, tmp_path / "run", SHORT)
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.slow
def test_ten_kills_of_two_ranks_leave_no_trace(tmp_path: Path) -> None:
    whole = undisturbed(tmp_path / "whole")
    kill_again_and_again(NUM_KILLS, tmp_path / "run")
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.parametrize("num_ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_another_number_of_ranks(num_ranks: int, whole: Path, tmp_path: Path) -> None:
    moved = tmp_path / "run"
    ranks = start(moved, 2, SHORT)
    assert ranks.wait_until(lambda: len(newest(moved)) > 0)
    ranks.members[1].signal(signal.SIGTERM)  # one hears it, both stop, and all that was trained is saved
    codes, output = ranks.wait()
    assert codes == [143, 143], output
    assert output.count("everything so far is saved") == 1
    codes, output = start(moved, num_ranks).wait()
    assert codes == [0] * num_ranks, output
    expected, got = (json.loads((run / "summary.json").read_text()) for run in (whole, moved))
    for key in ("steps", "images", "evaluations"):
        assert got["cost"][key] == expected["cost"][key]
    losses = [
        [json.loads(line).get("loss") for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (whole, moved)
    ]
    assert losses[1][:4] == pytest.approx(losses[0][:4], rel=1e-3)  # of the first task; later ones amplify rounding


def test_a_rank_that_dies_ends_the_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    ranks = start(out)
    assert ranks.wait_until(lambda: len(newest(out)) > 0)
    ranks.members[1].kill()
    code, output = ranks.members[0].wait()
    assert code == 2, output
    assert "Rank 0 of 2 has lost the connection to another rank" in output.splitlines()[-1]
    assert "Traceback" not in output


def test_a_rank_that_stalls_is_not_waited_for_longer_than_allowed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    ranks = start(out, 2, "runtime.timeout_seconds=10")
    ranks.wait_until(lambda: len(newest(out)) > 0)
    ranks.members[1].signal(signal.SIGSTOP)
    code, output = ranks.members[0].wait()
    ranks.kill()
    assert code == 2, output
    assert "has waited 10 seconds (runtime.timeout_seconds) for another rank" in output.splitlines()[-1]
    assert "it waits for another rank, for at most 10 seconds" in output  # said long before


def test_torchrun_prints_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "cflat"]
    words = [*map(str, arguments("icarl", "class", tmp_path / "run")), "runtime.devices=4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *words], capture_output=True, text=True, env=environment, check=False)
    said = [line for line in done.stderr.splitlines() if "cflat: " in line]
    assert said == [
        "cflat: torchrun has started 2 ranks on each of 1 hosts, but runtime.devices is 4 and runtime.num_nodes 1; "
        "leave both out, or start as many."
    ]
    assert not (tmp_path / "run").exists()
