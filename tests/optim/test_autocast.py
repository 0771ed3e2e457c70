"""Autocast inside, around and nested around a step: every evaluation sees the weights of the moment.

Autocast caches the cast weights until the outermost context ends; an engine that does not drop them evaluates the
unperturbed weights again and again.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cflat
from cases import case
from cflat.integrations import MicroBatches
from faults import DOORS, EVERY, Run, batch_of, differences, walk


def _autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


@contextmanager
def _nested():
    with _autocast(), torch.autocast("cpu", enabled=False), _autocast():
        yield


AROUND = {"around": _autocast, "nested": _nested}


def _train(row, door, around, num_steps=6):
    """Train with autocast inside the closure, or with ``around`` around all steps; return weights and losses."""
    run = Run(row)
    losses = []
    for _ in range(1):
        with around() if around else nullcontext():
            for step in range(num_steps):
                inputs, labels = batch_of(step)

                def closure(inputs=inputs, labels=labels):
                    with nullcontext() if around else _autocast():
                        loss = F.cross_entropy(run.model(inputs), labels)
                    loss.backward()
                    losses.append(loss.item())

                walk(door, run.optimizer, closure)
    return run, losses


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize("around", AROUND)
def test_autocast_around_a_step_equals_autocast_inside(row, around):
    inside, expected = _train(row, "step", None)
    for door in DOORS[:2]:
        run, losses = _train(row, door, AROUND[around])
        assert losses == expected
        assert not differences(run.model.state_dict(), inside.model.state_dict())
        assert not differences(run.state(), inside.state())


@pytest.mark.parametrize("around", AROUND)
def test_the_four_losses_of_c_flat_differ(around):
    _, losses = _train(case("c_flat"), "step", AROUND[around], num_steps=1)
    assert len(set(losses)) == 4


def test_what_is_evaluated_after_a_step_sees_the_new_weights():
    run = Run(case("sam"))
    inputs, _ = batch_of(0)
    run.model.eval()
    with _autocast():
        run.train(0)
        inside = run.model(inputs)
    with _autocast():
        assert torch.equal(inside, run.model(inputs))


def test_a_step_that_is_rolled_back_leaves_no_cast_weights():
    run = Run(case("c_flat"))
    inputs, _ = batch_of(0)
    run.model.eval()
    with _autocast():
        expected = run.model(inputs)
        for index in run.optimizer.passes():
            run.closure(0)()
            if index == 2:
                break
        assert torch.equal(run.model(inputs), expected)


@pytest.mark.parametrize("row", [case("c_flat"), case("msam")], ids=str)
def test_micro_batches_under_one_context(row):
    def train(around):
        run = Run(row)
        pending = MicroBatches(run.optimizer)

        def evaluate(step):
            inputs, labels = batch_of(step)
            with nullcontext() if around else _autocast():
                loss = F.cross_entropy(run.model(inputs), labels)
            loss.backward()

        with _autocast() if around else nullcontext():
            for step in range(6):
                (pending.step if step % 2 else pending.accumulate)(evaluate, step)
        return run

    assert not differences(train(True).world(), train(False).world())


def test_disabled_caching_works_as_well():
    layer = nn.Linear(3, 1)
    optimizer = cflat.SAM(torch.optim.SGD(layer.parameters(), lr=0.1), rho=0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        optimizer.step(lambda: layer(torch.ones(2, 3)).square().sum().backward())
    assert optimizer.telemetry.evaluations == 2
