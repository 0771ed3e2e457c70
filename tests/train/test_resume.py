"""A run that is stopped or crashes anywhere ends with the same bits as one that is not."""

import itertools
import random

import pytest
import torch

import cflat
from cflat.methods import get_method_spec, list_methods
from cflat.train import BaseSettings, Observer, TrainingInterrupted
from cflat.train.observer import Observers
from cflat.train.settings import list_bases
from runs import tiny_method, tiny_run, tiny_stream


class Crash(BaseException):
    """Dies like a kill: nothing may catch it and go on."""


class CrashAt(Observer):
    """Crash at the n-th event of any kind."""

    def __init__(self, event: int):
        self.left = event

    def _tick(self, *_):
        self.left -= 1
        if self.left < 0:
            raise Crash

    on_step = on_epoch = on_task_start = on_task_end = on_checkpoint = _tick


class Log(Observer):
    """Keeps records as metrics.jsonl does: its length is part of the checkpoint."""

    def __init__(self, records: list):
        self.records = records

    def on_epoch(self, record):
        own = {key: getattr(record, key) for key in ("task", "epoch", "loss", "lr")}
        self.records.append({**own, "evaluations": record.telemetry.evaluations})

    def on_task_end(self, record):
        self.records.append(record.task)

    def state(self):
        return {"length": len(self.records)}

    def load(self, state):
        del self.records[state["length"] :]


SHORT = {"duct": {"retrain_epochs": 1}}
"""By default its second phase alone is longer than all that the other methods do."""


def run_to_end(name, folder, crashes, **settings):
    """Crash once at each of ``crashes``, resuming each time, then finish; return the method, result and log."""
    stream, records = tiny_stream(num_tasks=4), []
    short = get_method_spec(name).config(**SHORT.get(name, {}))
    for crash in [*crashes, None]:
        method = tiny_method(name, stream, config=short)
        members = [Log(records)] + ([] if crash is None else [CrashAt(crash)])
        try:
            result = tiny_run(
                method,
                stream,
                folder=folder,
                resume=True,
                observer=Observers(members),
                checkpoint_minutes=0.0 if folder else 10.0,
                **settings,
            )
        except Crash:
            continue
        return method, result, records
    raise AssertionError("never finished")


def assert_same(one, other):
    (method_a, result_a, log_a), (method_b, result_b, log_b) = one, other
    state_a, state_b = method_a.state_dict(), method_b.state_dict()
    assert state_a.keys() == state_b.keys()
    for key, value in state_a.items():
        assert torch.equal(value, state_b[key]), key
    assert result_a.accuracy == result_b.accuracy
    assert result_a.cost.evaluations == result_b.cost.evaluations
    assert result_a.cost.evaluations_by_kind == result_b.cost.evaluations_by_kind
    assert log_a == log_b


TURBO = {"rho": 0.1, "k": 3, "threshold": 0.0}


@pytest.mark.parametrize("name", list_methods())
def test_crashes_anywhere_leave_no_trace(name, tmp_path):
    settings = {"optimizer": "c_flat_turbo", "settings": TURBO}
    whole = run_to_end(name, None, [], **settings)
    chooser = random.Random(name)
    broken = run_to_end(name, tmp_path, [chooser.randrange(12) for _ in range(6)], **settings)
    assert_same(whole, broken)


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        *((name, {}) for name in cflat.list_optimizers() if name != "c_flat_turbo"),
        ("c_flat_turbo", {**TURBO, "reading": "consistent"}),
        ("c_flat_turbo", {**TURBO, "reading": "calibrated"}),
    ],
)
def test_every_optimizer_resumes(optimizer, settings, tmp_path):
    whole = run_to_end("icarl", None, [], optimizer=optimizer, settings=settings)
    broken = run_to_end("icarl", tmp_path, [7, 5, 9], optimizer=optimizer, settings=settings)
    assert_same(whole, broken)


@pytest.mark.parametrize("name", list_bases())
def test_every_base_optimizer_resumes_within_a_phase(name, tmp_path):
    base = BaseSettings(name=name, lr=0.01)
    whole = run_to_end("finetune", None, [], base=base)
    broken = run_to_end("finetune", tmp_path, [2, 4], base=base)
    assert_same(whole, broken)


def test_a_request_to_stop_saves_and_says_so(tmp_path):
    stream, counter = tiny_stream(), itertools.count()
    with pytest.raises(TrainingInterrupted, match="saved"):
        tiny_run(
            tiny_method("replay", stream), stream, folder=tmp_path, should_stop=lambda: next(counter) >= 3, epochs=3
        )
    method = tiny_method("replay", stream)
    resumed = tiny_run(method, stream, folder=tmp_path, resume=True, epochs=3)
    whole = tiny_run(tiny_method("replay", stream), stream, epochs=3)
    assert resumed.accuracy == whole.accuracy


def test_resume_without_a_checkpoint_starts_anew(tmp_path):
    stream = tiny_stream()
    resumed = tiny_run(tiny_method("finetune", stream), stream, folder=tmp_path, resume=True)
    assert resumed.accuracy == tiny_run(tiny_method("finetune", stream), stream).accuracy


def test_a_finished_run_resumes_to_its_result(tmp_path):
    stream = tiny_stream()
    first = tiny_run(tiny_method("icarl", stream), stream, folder=tmp_path)
    again = tiny_run(tiny_method("icarl", stream), stream, folder=tmp_path, resume=True)
    assert again.accuracy == first.accuracy
    assert again.cost.steps == first.cost.steps
