"""A stop is heard in every pass, not only after steps; it says that everything is saved only if that is true."""

from __future__ import annotations

import itertools
import json
import random
import resource
import signal
from pathlib import Path

import pytest
import torch

from cflat.methods import list_methods
from cflat.runs.folder import RunFolder
from cflat.train import Observer, StateNotSaved, TrainingInterrupted
from processes import Command
from runs import tiny_method, tiny_run, tiny_stream


class Asked:
    """Answer with yes at the n-th time; count what was asked between steps and what in other passes."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.count = 0

    def __call__(self) -> bool:
        self.count += 1
        return self.count == self.number


class Steps(Observer):
    def __init__(self) -> None:
        self.count = 0

    def on_step(self, event: object) -> None:
        self.count += 1


@pytest.mark.parametrize("name", list_methods())
def test_stops_anywhere_leave_no_trace(name: str, tmp_path: Path) -> None:
    stream = tiny_stream(per_class=6)
    whole, steps, asked = tiny_method(name, stream), Steps(), Asked(0)
    expected = tiny_run(whole, stream, epochs=1, observer=steps, should_stop=asked)
    assert asked.count > steps.count + 2 * stream.num_tasks  # before every task, in evaluation, and between
    chooser = random.Random(name)
    for number in [chooser.randint(1, asked.count) for _ in range(8)]:
        stop = Asked(number)
        try:
            tiny_run(tiny_method(name, stream), stream, folder=tmp_path, resume=True, epochs=1, should_stop=stop)
        except TrainingInterrupted:
            assert stop.count == number
    last = tiny_method(name, stream)
    result = tiny_run(last, stream, folder=tmp_path, resume=True, epochs=1)
    assert result.accuracy == expected.accuracy
    assert result.cost.evaluations == expected.cost.evaluations
    for key, value in whole.state_dict().items():
        assert torch.equal(value, last.state_dict()[key]), key


def test_a_stop_while_testing_loses_no_step(tmp_path: Path) -> None:
    """No checkpoint is due; what was trained is saved before the tests begin."""
    stream, steps = tiny_stream(), Steps()
    num_steps = 3 * -(-len(stream.tasks[0].train) // 16)
    asked_before = itertools.count()

    def stop_behind_the_last_step() -> bool:
        return steps.count == num_steps and next(asked_before) == 1

    with pytest.raises(TrainingInterrupted, match="saved"):
        tiny_run(
            tiny_method("finetune", stream),
            stream,
            folder=tmp_path,
            epochs=3,
            observer=steps,
            should_stop=stop_behind_the_last_step,
        )
    again = Steps()
    tiny_run(tiny_method("finetune", stream), stream, folder=tmp_path, resume=True, epochs=3, observer=again)
    assert again.count == num_steps * (stream.num_tasks - 1)


# -- a state that cannot be saved -----------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["step", "test"])
def test_a_full_disk_is_said_at_the_stop(moment: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stream, steps = tiny_stream(), Steps()
    last = 2 * -(-len(stream.tasks[0].train) // 16)
    number = 1 if moment == "step" else last
    behind = itertools.count(0 if moment == "step" else -1)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(StateNotSaved, match=r"asked to stop, but what it has trained is lost: .+cannot be written"):
            tiny_run(
                tiny_method("finetune", stream),
                stream,
                folder=tmp_path,
                observer=steps,
                should_stop=lambda: steps.count >= number and next(behind) >= 0,
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "Training continues" in caplog.text


def test_a_folder_that_was_removed_is_said_at_the_stop(tmp_path: Path) -> None:
    stream, folder = tiny_stream(), tmp_path / "run"
    folder.mkdir()

    def remove() -> bool:
        folder.rmdir()
        return True

    with pytest.raises(StateNotSaved, match="was removed"):
        tiny_run(tiny_method("simplecil", stream), stream, folder=folder, should_stop=remove)


def test_without_a_folder_nothing_is_said_to_be_saved() -> None:
    stream = tiny_stream()
    with pytest.raises(TrainingInterrupted, match=r"^The run was asked to stop\.$"):
        tiny_run(tiny_method("simplecil", stream), stream, should_stop=lambda: True)


# -- real processes and signals -------------------------------------------------------------------------------------


def num_tasks_done(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_text().count('"event": "task"') if file.exists() else 0


def command(method: str, out: Path) -> tuple[str | Path, ...]:
    """Small batches at test time: thousands of them, in which a signal must be heard."""
    return (
        *("run", "--method", method, "--data", "digits", "--preset", "smoke", "--out", out, "--quiet"),
        *("data.train_per_class=80", "data.test_per_class=20", "train.eval_batch_size=2", "train.batch_size=64"),
        *("stream.initial=2", "stream.increment=2", "runtime.threads=1"),
    )


@pytest.mark.parametrize(("method", "number"), [("simplecil", signal.SIGINT), ("ranpac", signal.SIGTERM)])
def test_a_signal_is_heard_where_nothing_is_trained(method: str, number: signal.Signals, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    first = Command(*command(method, stopped), folder=tmp_path)
    assert first.wait_until(lambda: num_tasks_done(stopped) == 1)
    first.signal(number)
    code, output = first.wait()
    assert code == 128 + number, output
    assert f"Stopped; everything so far is saved. Resume it: cflat run --resume {stopped}" in output
    assert not RunFolder(stopped).is_finished
    second, other = (
        Command(*words, folder=tmp_path) for words in (("run", "--resume", stopped, "-q"), command(method, whole))
    )
    assert (second.wait()[0], other.wait()[0]) == (0, 0)
    found, expected = (json.loads((run / "summary.json").read_text())["scores"] for run in (stopped, whole))
    assert found == expected


def test_a_stop_that_cannot_save_says_so_and_exits_otherwise(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = Command(
        *("run", "--method", "finetune", "--data", "digits", "--preset", "smoke", "--out", run, "--quiet"),
        *("train.epochs=100000", "train.checkpoint_minutes=60"),
        folder=tmp_path,
    )
    assert process.wait_until(lambda: (run / "metrics.jsonl").exists())
    process.signal(signal.SIGSTOP)
    (run / "checkpoints").touch()  # a file where the folder should be
    process.signal(signal.SIGTERM)
    process.signal(signal.SIGCONT)
    code, output = process.wait()
    assert code == 3, output
    sentence = output.splitlines()[-1]
    assert sentence.startswith("cflat: The run was asked to stop, but what it has trained is lost: ")
    assert sentence.endswith("checkpoints' cannot be written: File exists.")
    assert "Traceback" not in output
