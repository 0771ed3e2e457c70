"""An Inf or NaN gradient in any pass skips the step, and nothing of it stays behind."""

from __future__ import annotations

import math

import pytest
import torch

from cflat import StepOptions
from faults import DOORS, EVERY, Run, differences, leaves, nth, walk

NUM_STEPS = 5


def _poison(run: Run, value: float) -> None:
    run.model.hidden.weight.grad[0, 0] = value


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize("guarded", [True, False], ids=["model", "no-model"])
def test_a_bad_gradient_in_any_pass_skips_the_step(row, guarded):
    run = Run(row, guarded=guarded)
    num_bad = 0
    for step in range(NUM_STEPS):
        for number in range(1, 5):
            if number > run.count(step):
                break
            door = DOORS[(step + number) % 3]
            weights = [param.detach().clone() for param in run.model.parameters()]
            buffers, base = run.world()["model"], run.state()["state"]
            closure = nth(run.closure(step), number, lambda n=number: _poison(run, math.inf if n % 2 else math.nan))
            walk(door, run.optimizer, closure)
            num_bad += 1
            telemetry = run.optimizer.telemetry
            assert telemetry.nonfinite == num_bad
            assert telemetry.last["nonfinite"]
            assert number <= telemetry.last["evaluations"] <= number + 1  # C-Flat sees a bad g_s in g_s - g
            assert all(torch.equal(p, old) for p, old in zip(run.model.parameters(), weights, strict=True))
            assert all(param.grad is None for param in run.model.parameters())
            assert not differences(run.state()["state"], base)
            if guarded:
                assert not differences(run.world()["model"], buffers)
        run.train(step)
    assert run.optimizer.telemetry.steps == NUM_STEPS + num_bad
    numbers = [v for _, v in (*leaves(run.state()), *leaves(run.world())) if isinstance(v, float | torch.Tensor)]
    assert all(torch.isfinite(torch.as_tensor(value)).all() for value in numbers)


# SS-SAM's coin and AE-SAM's threshold are functions of the number of steps, which counts skipped ones.
TIMELESS = [row.but(total_steps=None) if row.name == "ae_sam" else row for row in EVERY if row.name != "ss_sam"]


@pytest.mark.parametrize("row", TIMELESS, ids=str)
def test_statistics_and_caches_continue_as_if_the_step_had_not_been(row):
    calm = Run(row)
    calm.model.eval()  # no dropout: a skipped step has consumed its random numbers
    calm.train(0, 1, 2, 3, 4)
    run = Run(row)
    run.model.eval()
    for step in range(5):
        run.optimizer.step(nth(run.closure(step), 1, lambda: _poison(run, math.nan)))
        run.train(step)
    expected, found = calm.state()["wrapper"], run.state()["wrapper"]
    assert not differences(found["extra"], expected["extra"])
    assert not differences(found["memories"], expected["memories"])
    assert not differences(run.world()["model"], calm.world()["model"])


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_a_bad_batch_does_not_reach_the_running_statistics(row):
    """NaN inputs poison BatchNorm in the first forward pass already, so that has to be undone, too."""
    run = Run(row)
    run.train(0, 1)
    before = run.world()["model"]

    def closure():
        loss = run.model(torch.full((4, 5), math.nan)).sum()
        loss.backward()

    run.optimizer.step(closure)
    assert run.optimizer.telemetry.nonfinite == 1
    assert not differences(run.world()["model"], before)
    run.train(2, 3, 4)
    assert all(torch.isfinite(value).all() for value in run.model.state_dict().values())


def test_clipping_does_not_hide_a_bad_gradient():
    for clip in ("final", "each"):
        run = Run(EVERY[1], options=StepOptions(max_norm=1.0, clip=clip))
        before = run.world()["model"]
        run.optimizer.step(nth(run.closure(0), 2, lambda run=run: _poison(run, math.inf)))
        assert run.optimizer.telemetry.nonfinite == 1
        assert not differences(run.world()["model"], before)


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_zero_gradients_stay_zero(row):
    """Without a direction there is nothing to perturb along: weights rest and nothing divides by zero."""
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = row.make(torch.optim.SGD([weight], lr=0.1))
    for _ in range(6):
        optimizer.step(lambda: (weight * 0.0).sum().backward())
    assert torch.equal(weight, torch.tensor([1.0, -2.0]))
    assert optimizer.telemetry.nonfinite == 0
