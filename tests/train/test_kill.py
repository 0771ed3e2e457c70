"""SIGKILL at random moments of a real `cflat run`: training, evaluation, checkpoint writing."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

NUM_KILLS = 20


def command(method, folder):
    return [
        *(sys.executable, "-m", "cflat", "run", "--method", method, "--data", "digits"),
        *("--optimizer", "c_flat_turbo", "--out", str(folder), "--quiet"),
        *("data.train_per_class=16", "train.epochs=6", "train.checkpoint_minutes=0", "optimizer.threshold=0"),
    ]


def start(method, folder):
    arguments = command(method, folder)
    if (folder / "config.yaml").exists():
        arguments = [sys.executable, "-m", "cflat", "run", "--resume", str(folder), "--quiet"]
    return subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def checkpoints(folder):
    return sorted((folder / "checkpoints").glob("*.pt"))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["icarl", "memo"])
def test_twenty_kills_leave_no_trace(method, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(method, whole)
    chooser = random.Random(method)
    kills = 0
    while kills < NUM_KILLS:
        seen = checkpoints(broken)[-1:]
        process = start(method, broken)
        while process.poll() is None and checkpoints(broken)[-1:] == seen:
            time.sleep(0.02)  # let it make progress, so that twenty kills spread over the run
        time.sleep(chooser.uniform(0, 0.15))
        is_alive = process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert is_alive, f"the run ended after {kills} kills; make it longer"
        kills += 1
    finish(method, broken)
    assert_same_run(whole, broken)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ease", "ranpac"])
def test_killed_in_the_middle_of_later_tasks(method, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(method, whole)
    chooser = random.Random(method)
    for num_done in (1, 2, 3):  # RanPAC takes no step after the first task: it dies while it gathers its statistics
        process = start(method, broken)
        while process.poll() is None and num_finished_tasks(broken) < num_done:
            time.sleep(0.005)
        seen = checkpoints(broken)[-1:]
        while method == "ease" and process.poll() is None and checkpoints(broken)[-1:] == seen:
            time.sleep(0.005)  # until a step of the next task is behind it
        time.sleep(chooser.uniform(0, 0.05))
        is_alive = process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert is_alive, f"the run ended before it could be killed after {num_done} tasks; make it longer"
        assert num_finished_tasks(broken) < num_finished_tasks(whole)
    finish(method, broken)
    assert_same_run(whole, broken)


def num_finished_tasks(folder):
    file = folder / "metrics.jsonl"
    return file.read_text().count('"event": "task"') if file.exists() else 0


def finish(method, folder):
    process = start(method, folder)
    _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()


def assert_same_run(whole, broken):
    expected, got = (json.loads((folder / "summary.json").read_text()) for folder in (whole, broken))
    for key in ("avg", "last", "forgetting", "accuracy_matrix", "stage_accuracy", "evaluations_per_step"):
        assert got[key] == expected[key], key
    states = [torch.load(checkpoints(folder)[-1], weights_only=True)["method"] for folder in (whole, broken)]
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key
    records = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in (whole, broken)
    ]
    assert [(r["event"], r["task"], r.get("epoch"), r.get("loss")) for r in records[0]] == [
        (r["event"], r["task"], r.get("epoch"), r.get("loss")) for r in records[1]
    ]
