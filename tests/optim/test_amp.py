"""Mixed precision: bfloat16 autocast, float16-style loss scaling through both doors, and its misuse."""

from __future__ import annotations

import math

import pytest
import torch
from torch.amp import GradScaler
from torch.nn import functional as F

import cflat
from cases import case
from cflat import StepOptions
from faults import DOORS, EVERY, Run, batch_of, differences, nth, walk


def _scaler(scale: float = 2.0**12, **settings) -> GradScaler:
    return GradScaler("cpu", init_scale=scale, **settings)


def _scaled(run: Run, step: int, scaler: GradScaler):
    inputs, labels = batch_of(step)

    def closure():
        loss = F.cross_entropy(run.model(inputs), labels)
        scaler.scale(loss).backward()
        return loss

    return closure


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize("door", DOORS)
def test_scaling_the_loss_changes_nothing(row, door):
    """Scales are powers of two: dividing by them is exact, so the runs are bit-equal."""
    plain = Run(row)
    plain.train(*range(6))
    world = plain.world()
    run, scaler = Run(row), _scaler(growth_interval=2)
    for step in range(6):
        walk(door, run.optimizer, _scaled(run, step, scaler), scaler=scaler)
        scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert not differences(run.world(), world)


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize("clip", ["final", "each"])
def test_clipping_sees_unscaled_gradients(row, clip):
    options = StepOptions(max_norm=0.05, clip=clip)
    plain = Run(row, options=options)
    plain.train(0, 1, 2)
    run, scaler = Run(row, options=options), _scaler()
    for step in range(3):
        run.optimizer.step(_scaled(run, step, scaler), scaler=scaler)
        scaler.update()
    assert not differences(run.model.state_dict(), plain.model.state_dict())


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize("door", DOORS)
def test_an_overflow_in_any_pass_skips_and_backs_off(row, door):
    run, scaler = Run(row), _scaler()

    def overflow():
        run.model.hidden.weight.grad[0] = math.inf

    num_bad = 0
    for step in range(3):
        for number in range(1, 5):
            if number > run.count(step):
                break
            before, scale = run.world()["model"], scaler.get_scale()
            walk(door, run.optimizer, nth(_scaled(run, step, scaler), number, overflow), scaler=scaler)
            scaler.update()
            num_bad += 1
            assert scaler.get_scale() == scale / 2
            assert not differences(run.world()["model"], before)
        walk(door, run.optimizer, _scaled(run, step, scaler), scaler=scaler)
        scaler.update()
    assert run.optimizer.telemetry.nonfinite == num_bad
    assert all(torch.isfinite(param).all() for param in run.model.parameters())


@pytest.mark.parametrize("door", DOORS)
def test_a_disabled_scaler_does_nothing(door):
    run, scaler = Run(case("sam")), GradScaler("cpu", enabled=False)
    before = run.world()["model"]

    def bad():
        run.closure(0)()
        run.model.hidden.weight.grad[0] = math.nan

    walk(door, run.optimizer, bad, scaler=scaler)
    assert not differences(run.world()["model"], before)
    walk(door, run.optimizer, run.closure(0), scaler=scaler)
    assert run.optimizer.telemetry.nonfinite == 1


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_a_scaler_that_drives_the_step_is_refused(row):
    """It would hand over gradients that are 65536 times too large, or evaluate only once."""
    run, scaler = Run(row), _scaler()
    before = run.world()["model"]
    closure = _scaled(run, 0, scaler)
    closure()
    with pytest.raises(cflat.ClosureError, match=r"Write optimizer\.step\(closure, scaler=scaler\)"):
        scaler.step(run.optimizer, closure)
    scaler.update()
    run.model.load_state_dict(before)
    closure()
    with pytest.raises(cflat.ClosureError, match=r"Write optimizer\.step\(closure, scaler=scaler\)"):
        scaler.step(run.optimizer)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(run.optimizer, closure=closure)
    scaler.update()
    run.model.load_state_dict(before)
    run.optimizer.zero_grad()
    run.optimizer.step(closure, scaler=scaler)  # the right way works after the wrong one
    scaler.update()
    assert run.optimizer.telemetry.steps == 1


@pytest.mark.parametrize("which", ["wrapper", "base"])
def test_unscaling_inside_a_step_is_refused(which):
    run, scaler = Run(case("sam")), _scaler()
    before = run.world()["model"]
    target = run.optimizer if which == "wrapper" else run.base
    with pytest.raises(cflat.ClosureError, match=r"unscale_\(\) was called inside a step.*StepOptions\(max_norm"):
        run.optimizer.step(nth(_scaled(run, 0, scaler), 1, lambda: scaler.unscale_(target)), scaler=scaler)
    assert not differences(run.world()["model"], before)


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16_trains(row, master):
    run = Run(row)
    run.model.to(master)
    losses = []
    for _ in range(12):
        inputs, labels = batch_of(0, size=16)

        def closure(inputs=inputs, labels=labels):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(run.model(inputs.to(master)).float(), labels)
            loss.backward()
            return loss

        losses.append(run.optimizer.step(closure).item())
    assert run.optimizer.telemetry.nonfinite == 0
    assert min(losses[-3:]) < losses[0]
    assert all(param.dtype == master for param in run.model.parameters())


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_an_overflow_is_seen_if_the_first_parameter_is_empty(row):
    empty, weight = torch.nn.Parameter(torch.zeros(0)), torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = row.make(torch.optim.SGD([empty, weight], lr=0.1)), _scaler()

    def closure():
        scaler.scale((weight.square().sum() + empty.sum()) * math.inf).backward()

    optimizer.step(closure, scaler=scaler)
    scaler.update()
    assert scaler.get_scale() == 2.0**11
    assert optimizer.telemetry.nonfinite == 1
