"""The fast optimizers against slow ones that were written from the specification (tests/reference)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import cflat
from cases import (
    BASES,
    CONV,
    FORECAST_VARIANTS,
    MLP,
    OPTIMIZERS,
    TURBO,
    TURBO_VARIANTS,
    VARIANTS,
    Case,
    Problem,
    case,
    closure_of,
    flat_weights,
    loss_of,
)
from reference import REFERENCES, ReferenceTrainer

NUM_TASKS = 3
TOLERANCE = 1e-10


def two_of_three(step: int) -> float:
    """A coin without chance, so that SS-SAM and its reference need not share a generator."""
    return float(step % 3 != 1)


def deterministic(row: Case) -> Case:
    return row.but(p=two_of_three) if row.name == "ss_sam" else row


def gap(model: nn.Module, reference: nn.Module) -> float:
    exact = flat_weights(reference)
    return ((flat_weights(model).double() - exact).norm() / exact.norm()).item()


def take_step(optimizer: cflat.SharpnessAware, model: nn.Module, batch, door: str) -> list[float]:
    """Take one step through a door and return the loss of each evaluation."""
    log: list[float] = []
    closure = closure_of(model, batch, log)
    if door == "closure":
        optimizer.step(closure)
    else:
        for _ in optimizer.passes():
            closure()
    return log


def make_pair(row: Case, problem: Problem, base: str, dtype=torch.float64):
    row = deterministic(row)
    model, copy = problem.model(dtype), problem.model()
    optimizer = row.make(BASES[base](model), model=model)
    trainer = ReferenceTrainer(copy, BASES[base](copy), REFERENCES[row.name](**row.settings), loss_of)
    return model, optimizer, copy, trainer


@pytest.mark.parametrize(
    ("row", "problem", "base", "door", "num_steps"),
    [
        *[pytest.param(row, MLP, "sgd", "closure", 120, id=f"{row}-mlp-sgd") for row in OPTIMIZERS],
        *[pytest.param(row, MLP, "adam", "passes", 120, id=f"{row}-mlp-adam") for row in OPTIMIZERS],
        *[pytest.param(row, CONV, "groups", "closure", 120, id=f"{row}-conv-groups") for row in OPTIMIZERS],
        *[pytest.param(row, MLP, "groups", "passes", 60, id=f"{row}-mlp-groups") for row in VARIANTS],
        *[
            pytest.param(row, CONV, "adam", "passes", 60, id=f"{row}-conv-adam")
            for row in (*TURBO_VARIANTS[:2], *FORECAST_VARIANTS[:2])
        ],
    ],
)
def test_equals_the_reference_across_tasks(row: Case, problem: Problem, base: str, door: str, num_steps: int) -> None:
    model, optimizer, copy, trainer = make_pair(row, problem, base)
    for step in range(num_steps):
        if step % (num_steps // NUM_TASKS) == 0:
            task = step * NUM_TASKS // num_steps
            optimizer.start_task(task, num_tasks=NUM_TASKS)
            trainer.algorithm.start_task(task, NUM_TASKS)
        batch = problem.batch(step)
        log = take_step(optimizer, model, batch, door)
        assert trainer.step(batch) == len(log), f"evaluations of step {step}"
        assert abs(log[-1] - trainer.losses[-1]) < 1e-9, f"loss of the last evaluation of step {step}"
        if step % 5 == 4:
            assert gap(model, copy) < TOLERANCE, f"weights after step {step}"
    for (name, buffer), expected in zip(model.named_buffers(), copy.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("row", [TURBO, *TURBO_VARIANTS], ids=str)
def test_parity_runs_take_every_branch_of_turbo(row: Case) -> None:
    model = MLP.model()
    optimizer = row.make(BASES["sgd"](model), model=model)
    for step in range(40):
        optimizer.step(closure_of(model, MLP.batch(step)))
    for branch in (optimizer.telemetry.sharpness, optimizer.telemetry.flatness):
        assert branch.refreshed > 0
        assert branch.reused > 0
        assert (branch.skipped > 0) == row.settings.get("trigger", True)


def test_turbo_equals_the_reference_where_one_branch_is_exact_and_the_other_is_not() -> None:
    row = TURBO.but("-mixed", reading="calibrated", threshold=0.5, k=4, k_growth=0.0)
    model, optimizer, copy, trainer = make_pair(row, MLP, "sgd")
    taken = set()
    for step in range(120):
        take_step(optimizer, model, MLP.batch(step), "closure")
        trainer.step(MLP.batch(step))
        taken.add((optimizer.telemetry.last["sharpness"], optimizer.telemetry.last["flatness"]))
    assert gap(model, copy) < TOLERANCE
    outcomes = ("refreshed", "reused", "skipped")
    assert taken == {(sharp, flat) for sharp in outcomes[:2] for flat in outcomes} | {("skipped", "skipped")}


@pytest.mark.parametrize("name", ["gsam", "c_flat", "c_flat_turbo", "c_flat_forecast"])
def test_equals_the_reference_with_the_radius_of_the_theorem(name: str) -> None:
    row = case(name)
    check_schedule(row, cflat.InverseSqrt(0.3), lambda t, lr: 0.3 / math.sqrt(t + 1))


@pytest.mark.parametrize("name", ["gsam", "c_flat", "c_flat_turbo", "c_flat_forecast"])
def test_equals_the_reference_with_a_radius_tied_to_the_learning_rate(name: str) -> None:
    schedule = cflat.TiedToLR(rho_max=0.2, lr_max=0.1, rho_min=0.02, lr_min=0.01)
    check_schedule(case(name), schedule, lambda t, lr: 0.02 + (0.2 - 0.02) * (lr - 0.01) / (0.1 - 0.01))


def check_schedule(row: Case, schedule, formula) -> None:
    """Compare the two over 30 steps of a learning rate that falls, the radius coming from schedule and formula."""
    model, copy = MLP.model(), MLP.model()
    base, twin = BASES["sgd"](model), BASES["sgd"](copy)
    optimizer = row.make(base, model=model, rho=schedule)
    trainer = ReferenceTrainer(copy, twin, REFERENCES[row.name](**{**row.settings, "rho": formula}), loss_of)
    rates = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 30, eta_min=0.01) for o in (optimizer, twin)]
    radii = set()
    for step in range(30):
        batch = MLP.batch(step)
        optimizer.step(closure_of(model, batch))
        trainer.step(batch)
        assert optimizer.telemetry.last["rho"] == pytest.approx(trainer.algorithm.rho, rel=1e-12)
        radii.add(optimizer.telemetry.last["rho"])
        assert gap(model, copy) < TOLERANCE
        for rate in rates:
            rate.step()
    assert len(radii) == 30


@pytest.mark.parametrize("row", [*OPTIMIZERS, *TURBO_VARIANTS[:2]], ids=str)
def test_float32_stays_near_the_float64_reference(row: Case) -> None:
    model, optimizer, copy, trainer = make_pair(row, CONV, "sgd", torch.float32)
    for step in range(10):
        log = take_step(optimizer, model, CONV.batch(step, torch.float32), "closure")
        assert trainer.step(CONV.batch(step)) == len(log)
    assert 0 < gap(model, copy) < 2e-4


@pytest.mark.parametrize("row", [*OPTIMIZERS, *TURBO_VARIANTS[:2]], ids=str)
def test_both_doors_give_the_same_bits(row: Case) -> None:
    weights = []
    for door in ("closure", "passes"):
        model = CONV.model(torch.float32)
        optimizer = row.make(BASES["groups"](model), model=model)
        for step in range(10):
            take_step(optimizer, model, CONV.batch(step, torch.float32), door)
        weights.append(flat_weights(model))
    assert torch.equal(*weights)
