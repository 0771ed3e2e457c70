"""What a run is said to cost."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from cflat.optim import Telemetry
from cflat.train.meters import WARMUP_STEPS, CostMeter, StopWatch, count_flops


def test_speed_is_that_of_the_steps_after_the_first_ten() -> None:
    meter = CostMeter()
    for _ in range(WARMUP_STEPS):
        meter.add_step(8, step_seconds=100.0, data_seconds=10.0)
    for _ in range(WARMUP_STEPS):
        meter.add_step(8, step_seconds=2.0, data_seconds=0.5)
    cost = meter.summary()
    assert (cost.steps, cost.images) == (20, 160)
    assert (cost.images_per_second, cost.step_seconds, cost.data_seconds) == (4.0, 2.0, 0.5)
    meter.add_wait(20.0)
    assert meter.summary().images_per_second == 2.0


def test_short_runs_are_measured_whole() -> None:
    meter = CostMeter()
    for _ in range(WARMUP_STEPS + 1):
        meter.add_step(4, step_seconds=2.0, data_seconds=0.0)
    assert meter.summary().images_per_second == 2.0
    assert CostMeter().summary().images_per_second == 0.0


def test_phases_add_up_and_survive_a_restart() -> None:
    meter = CostMeter()
    telemetry = Telemetry(steps=3, evaluations=9, nonfinite=1)
    telemetry.sharpness.refreshed = 3
    for _ in range(2):
        meter.add_phase(telemetry, flops_per_step=10.0, flops_per_evaluation=100.0)
    again = CostMeter(**asdict(meter))
    assert again == meter
    cost = again.summary()
    assert (cost.evaluations, cost.nonfinite_steps, cost.flops) == (18, 2, 2 * (3 * 10 + 9 * 100))
    assert cost.evaluations_by_kind["sharpness.refreshed"] == 6
    again.branches["sharpness.refreshed"] = 0
    assert meter.branches["sharpness.refreshed"] == 6


def test_arithmetic_is_counted() -> None:
    left, right = torch.zeros(3, 4), torch.zeros(4, 5)
    assert count_flops(lambda: left @ right) == 2 * 3 * 4 * 5


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_processor_is_always_exact(is_exact: bool) -> None:
    watch = StopWatch(torch.device("cpu"), is_exact=is_exact)
    assert watch.is_exact
    assert watch.lap() >= 0
