"""What a run is reported to cost."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from cflat.optim import Telemetry
from cflat.train.meter import WARMUP_STEPS, Meter, count_flops, peak_memory_bytes


class Clock:
    """Time passes only when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def a_meter() -> tuple[Meter, Clock]:
    clock = Clock()
    return Meter(torch.device("cpu"), clock=clock), clock


def train(meter: Meter, clock: Clock, steps: int, images: int, step_seconds: float, data_seconds: float = 0.0) -> None:
    def batches():
        for _ in range(steps):
            clock.now += data_seconds
            yield images

    for batch in meter.loading(batches()):
        with meter.training():
            clock.now += step_seconds
        clock.now += 1000.0  # observers and checkpoints are no cost of training
        meter.add_step(batch)


def test_speed_is_that_of_the_steps_after_the_first_ten() -> None:
    meter, clock = a_meter()
    train(meter, clock, WARMUP_STEPS, images=8, step_seconds=100.0, data_seconds=10.0)
    train(meter, clock, WARMUP_STEPS, images=8, step_seconds=2.0, data_seconds=0.5)
    cost = meter.summary()
    assert (cost.steps, cost.images) == (20, 160)
    assert (cost.images_per_second, cost.step_seconds, cost.data_seconds) == (4.0, 2.0, 0.5)


def test_short_runs_are_measured_whole() -> None:
    meter, clock = a_meter()
    assert meter.summary().images_per_second == 0.0
    train(meter, clock, WARMUP_STEPS + 1, images=4, step_seconds=2.0)
    assert meter.summary().images_per_second == 2.0


def test_memory_of_a_run_on_a_cpu_is_not_that_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # a machine that has one
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 0)
    assert peak_memory_bytes(torch.device("cpu")) > 1 << 20


def test_phases_add_up_and_survive_a_restart() -> None:
    meter, clock = a_meter()
    train(meter, clock, WARMUP_STEPS + 1, images=4, step_seconds=2.0)
    telemetry = Telemetry(steps=3, evaluations=9, nonfinite=1)
    telemetry.sharpness.refreshed = 3
    for _ in range(2):
        meter.add_phase(telemetry, (10.0, 100.0))
    again = a_meter()[0]
    again.load(asdict(meter.counters))
    assert again.counters == meter.counters
    cost = again.summary()
    assert (cost.evaluations, cost.nonfinite_steps, cost.flops) == (18, 2, 2 * (3 * 10 + 9 * 100))
    assert cost.evaluations_by_kind["sharpness.refreshed"] == 6


def test_arithmetic_is_counted() -> None:
    left, right = torch.zeros(3, 4), torch.zeros(4, 5)
    assert count_flops(lambda: left @ right) == 2 * 3 * 4 * 5
