"""Hooks on the wrapper and on the base, through both doors, and the names that profilers show."""

from __future__ import annotations

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from faults import DOORS, EVERY, Run, differences, walk


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize("door", DOORS)
def test_step_hooks_run_once_per_step(row, door):
    run = Run(row)
    calls = []
    run.optimizer.register_step_pre_hook(lambda opt, args, kwargs: calls.append(("pre", opt)))
    run.base.register_step_pre_hook(lambda opt, args, kwargs: calls.append(("base pre", opt)))
    run.base.register_step_post_hook(lambda opt, args, kwargs: calls.append(("base post", opt)))
    run.optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append(("post", opt)))
    for step in range(3):
        calls.clear()
        walk(door, run.optimizer, run.closure(step))
        assert [name for name, _ in calls] == ["pre", "base pre", "base post", "post"]
        assert [opt for _, opt in calls] == [run.optimizer, run.base, run.base, run.optimizer]


@pytest.mark.parametrize("door", DOORS)
def test_base_hooks_see_the_direction_and_unperturbed_weights(door):
    run = Run(EVERY[10])
    assert run.optimizer.telemetry.last == {}
    before = run.model.hidden.weight.detach().clone()
    seen = []

    def hook(opt, args, kwargs):
        seen.append(torch.equal(run.model.hidden.weight, before))
        run.model.hidden.weight.grad.zero_()

    run.base.register_step_pre_hook(hook)
    run.base.param_groups[0].update(momentum=0.0, weight_decay=0.0)
    walk(door, run.optimizer, run.closure(0))
    assert seen == [True]
    assert torch.equal(run.model.hidden.weight, before)


@pytest.mark.parametrize("door", DOORS)
def test_a_skipped_step_does_not_reach_the_base(door):
    run = Run(EVERY[1])
    calls = []
    run.base.register_step_post_hook(lambda *_: calls.append("base"))
    run.optimizer.register_step_post_hook(lambda *_: calls.append("wrapper"))

    def bad():
        run.closure(0)()
        run.model.head.bias.grad.fill_(float("inf"))

    walk(door, run.optimizer, bad)
    assert calls == ["wrapper"]


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_profilers_show_the_class(row):
    run = Run(row)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run.train(0)
        run.optimizer.zero_grad()
    names = {event.key for event in profile.key_averages()}
    assert f"Optimizer.step#{type(run.optimizer).__name__}.step" in names
    assert "Optimizer.step#SGD.step" in names


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears(row, set_to_none):
    run = Run(row)
    run.closure(0)()
    run.optimizer.zero_grad(set_to_none)
    gradient = run.model.hidden.weight.grad
    assert gradient is None if set_to_none else not gradient.any()


class _Stop(Exception):
    pass


def _fail(*_):
    raise _Stop


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("where", ["base", "gradient"])
def test_a_hook_that_raises_before_the_base_steps_leaves_no_trace(row, door, where):
    """Weights, buffers, random numbers and what the algorithm remembers are as if the step had never begun."""
    calm, run = Run(row), Run(row)
    random = torch.get_rng_state()
    calm.train(0, 1, 2, 3)
    expected = calm.world()
    torch.set_rng_state(random)
    run.train(0, 1)
    world, state = run.world(), run.state()
    register = run.base.register_step_pre_hook if where == "base" else run.optimizer.register_gradient_hook
    handle = register(_fail)
    with pytest.raises(_Stop):
        walk(door, run.optimizer, run.closure(2))
    handle.remove()
    assert not differences(run.world(), world)
    assert all(path.endswith("/norm") for path in differences(run.state(), state))
    assert all(param.grad is None for param in run.model.parameters())
    run.train(2, 3)
    assert not differences(run.world(), expected)


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("owner", ["base", "wrapper"])
def test_a_hook_that_raises_after_the_base_has_stepped_does_not_undo_the_step(row, door, owner):
    calm, run = Run(row), Run(row)
    random = torch.get_rng_state()
    calm.train(0, 1, 2, 3)
    expected = calm.world(), calm.state()
    torch.set_rng_state(random)
    run.train(0, 1)
    handle = (run.base if owner == "base" else run.optimizer).register_step_post_hook(_fail)
    with pytest.raises(_Stop):
        walk(door, run.optimizer, run.closure(2))
    handle.remove()
    assert run.optimizer.telemetry.steps == 3
    run.train(3)
    assert not differences((run.world(), run.state()), expected)


def test_no_hook_of_ours_stays_on_the_base():
    run = Run(EVERY[1])
    run.train(0)
    assert not run.base._optimizer_step_post_hooks


@pytest.mark.parametrize("door", DOORS)
def test_global_hooks_run_for_the_wrapper_and_its_base(door):
    run = Run(EVERY[1])
    calls = []
    run.optimizer.register_step_pre_hook(lambda *_: calls.append("own pre"))
    run.optimizer.register_step_post_hook(lambda *_: calls.append("own post"))
    handles = [
        register_optimizer_step_pre_hook(lambda opt, args, kwargs: calls.append(("pre", opt))),
        register_optimizer_step_post_hook(lambda opt, args, kwargs: calls.append(("post", opt))),
    ]
    try:
        walk(door, run.optimizer, run.closure(0))
    finally:
        for handle in handles:
            handle.remove()
    inner = [("pre", run.base), ("post", run.base)]
    assert calls == [("pre", run.optimizer), "own pre", *inner, "own post", ("post", run.optimizer)]


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_only_gradients_at_theta_are_called_g(row):
    run = Run(row)
    names, are_at_theta = [], []
    run.optimizer.register_gradient_hook(lambda evaluation: names.append(evaluation.name))
    for step in range(3):
        theta = [param.detach().clone() for param in run.model.parameters()]

        def closure(step=step, theta=theta):
            are_at_theta.append(all(map(torch.equal, run.model.parameters(), theta)))
            return run.closure(step)()

        run.optimizer.step(closure)
    assert [name == "g" for name in names] == are_at_theta
