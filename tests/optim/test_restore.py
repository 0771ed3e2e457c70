"""A step that is left in the middle, however, is as if it had never begun."""

from __future__ import annotations

import copy
import re

import pytest
import torch

import cflat
from cases import case
from faults import DOORS, EVERY, Run, differences, nth, walk

NUM_STEPS = 7


def _raise(error: type[BaseException]) -> None:
    raise error("in the middle")


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize(("door", "base"), [*((door, "") for door in DOORS), ("step", "qhm")])
def test_an_exception_in_any_pass_leaves_no_trace(row, door, base):
    calm = Run(row, base=base)
    calm.train(*range(NUM_STEPS))
    end = calm.world()

    run = Run(row, base=base)
    for step in range(NUM_STEPS):
        world, state = run.world(), run.state()
        for number in range(1, run.count(step) + 1):
            error = KeyboardInterrupt if number % 2 else RuntimeError
            with pytest.raises(error, match="in the middle"):
                walk(door, run.optimizer, nth(run.closure(step), number, lambda error=error: _raise(error)))
            assert not differences(run.world(), world)
            wrong = differences(run.state(), state)
            # The norm of what is remembered may have been read.
            assert all(re.match("/wrapper/memories/.*/norm", path) for path in wrong), wrong
            assert all(param.grad is None for param in run.model.parameters())
        walk(door, run.optimizer, run.closure(step))
    assert not differences(run.world(), end)
    assert not differences(run.state(), calm.state())


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_a_given_up_step_is_not_part_of_the_run(row):
    """Steps on other batches fail in between, and training goes on as if they had not been tried."""
    calm = Run(row)
    calm.train(*range(NUM_STEPS))
    run = Run(row)
    run.train(0)
    for step in range(1, NUM_STEPS):
        for number in (1, 2):
            with pytest.raises(ZeroDivisionError):
                run.optimizer.step(nth(run.closure(50 + step), min(number, run.count(50 + step)), lambda: 1 / 0))
        run.train(step)
    assert not differences(run.model.state_dict(), calm.model.state_dict())


def _perturbed() -> tuple[Run, dict, cflat.optim._passes.Passes]:
    run = Run(case("c_flat"))
    run.train(0)
    world = run.world()
    passes = run.optimizer.passes()
    for index in passes:
        run.closure(1)()
        if index == 2:
            break
    assert differences(run.model.state_dict(), world["model"])
    return run, world, passes


def test_closing_or_dropping_the_iterator_restores():
    run, world, passes = _perturbed()
    passes.close()
    assert not differences(run.world(), world)
    assert list(passes) == []

    run, world, passes = _perturbed()
    del passes
    assert not differences(run.world(), world)


@pytest.mark.parametrize("call", ["state_dict", "start_task", "step", "passes", "add_param_group", "deepcopy"])
def test_the_next_call_on_the_optimizer_restores_and_the_loop_is_told(call):
    run, world, passes = _perturbed()
    if call == "step":
        run.optimizer.step(run.closure(1))
    elif call == "start_task":
        run.optimizer.start_task(1)
    elif call == "add_param_group":
        run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    elif call == "deepcopy":
        copy.deepcopy(run.optimizer)
    else:
        getattr(run.optimizer, call)()
    if call != "step":
        assert not differences(run.world(), world)
    with pytest.raises(cflat.ClosureError, match=r"rolled back because another call .* outside the loop"):
        next(passes)


@pytest.mark.parametrize("call", ["state_dict", "start_task", "step"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_call_on_the_optimizer_inside_a_closure_is_refused(call, number):
    run = Run(case("sam"))
    run.train(0)
    world = run.world()
    calls = {
        "state_dict": run.optimizer.state_dict,
        "start_task": lambda: run.optimizer.start_task(1),
        "step": lambda: run.optimizer.step(nth(run.closure(1), 1, lambda: _raise(ValueError))),
    }
    with pytest.raises((cflat.ClosureError, ValueError), match=r"outside the loop|in the middle"):
        run.optimizer.step(nth(run.closure(1), number, calls[call]))
    assert not differences(run.world(), world)


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize("door", ["with", "bare"])
def test_break_gives_the_step_up(row, door):
    run = Run(row)
    run.train(0, 1)
    world, state = run.world(), run.state()

    def leave_early(passes):
        for _ in passes:
            run.closure(2)()
            break

    if door == "with":
        with run.optimizer.passes() as passes:
            leave_early(passes)
    else:
        leave_early(run.optimizer.passes())
    assert not differences(run.world(), world)
    assert all(path.endswith("/norm") for path in differences(run.state(), state))


def test_a_base_that_fails_does_not_advance_the_algorithm():
    """Adam refuses sparse gradients when it steps: by then the weights must be back and the step not counted."""
    table = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = cflat.CFlatTurbo(torch.optim.Adam(table.parameters()))
    before, state = table.weight.detach().clone(), optimizer.state_dict()

    def closure():
        table(torch.tensor([1, 2])).square().sum().backward()

    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step(closure)
    assert torch.equal(table.weight, before)
    assert not differences(optimizer.state_dict(), state)


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_steps", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_weights_do_not_drift(row, dtype, num_steps):
    """Steps at learning rate 0 change no bit, whatever the precision."""
    _assert_no_drift(row, dtype, num_steps)


@pytest.mark.parametrize("name", ["c_flat", "c_flat_turbo"])
def test_weights_do_not_drift_in_the_long_run(name):
    _assert_no_drift(case(name), torch.bfloat16, 1000)


def _assert_no_drift(row, dtype, num_steps):
    model = torch.nn.Linear(4, 2).to(dtype)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = row.make(torch.optim.SGD(model.parameters(), lr=0.0))
    inputs = torch.randn(3, 4, dtype=dtype)

    def closure():
        model(inputs).square().sum().backward()

    for _ in range(num_steps):
        optimizer.step(closure)
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))
    assert optimizer.telemetry.nonfinite == 0
