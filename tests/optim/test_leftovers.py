"""Never silently wrong: gradients from before the step, evaluations without backward, loops that were forgotten."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cflat
from cases import ADAPTIVE, case
from cflat.integrations import MicroBatches
from faults import DOORS, EVERY, Run, batch_of, differences, walk

SEVERAL = [row for row in EVERY if row.name != "none"]


def _loss(run, step):
    inputs, labels = batch_of(step)
    return F.cross_entropy(run.model(inputs), labels) / 3


def _evaluate(run, *steps):
    for step in steps:
        _loss(run, step).backward()


@pytest.mark.parametrize("row", SEVERAL, ids=str)
@pytest.mark.parametrize("door", DOORS)
def test_accumulated_gradients_are_not_dropped(row, door):
    run = Run(row)
    run.train(0, 1)
    run.optimizer.zero_grad()
    _evaluate(run, 2)
    world, state = run.world(), run.state()
    with pytest.raises(cflat.ClosureError, match=r"accumulated before this step.*inside the closure.*zero_grad\(\)"):
        walk(door, run.optimizer, run.closure(3))
    assert not differences(run.world(), world)
    assert not differences(run.state(), state)
    run.optimizer.zero_grad()
    walk(door, run.optimizer, run.closure(3))
    assert run.optimizer.telemetry.steps == 3


@pytest.mark.parametrize("row", SEVERAL, ids=str)
def test_gradients_added_to_those_of_the_last_step_are_found(row):
    run = Run(row)
    run.train(0)
    _evaluate(run, 1)
    with pytest.raises(cflat.ClosureError, match="accumulated before this step"):
        run.train(2)


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize("clearing", ["not", "none", "zeros"])
def test_what_a_step_leaves_behind_is_no_obstacle(row, clearing):
    plain, run = Run(row), Run(row)
    plain.train(0, 1, 2)
    expected = plain.world()["model"]
    torch.manual_seed(7)
    run.model.load_state_dict(Run(row).model.state_dict())
    for step in range(3):
        run.train(step)
        if clearing != "not":
            run.optimizer.zero_grad(set_to_none=clearing == "none")
    assert not differences(run.world()["model"], expected)


def test_one_evaluation_adds_to_what_was_accumulated():
    """As torch does: the base alone needs no second look at the micro-batches."""
    whole, parts = Run(case("none")), Run(case("none"))
    torch.manual_seed(1)
    whole.optimizer.step(lambda: _evaluate(whole, 0, 1, 2))
    torch.manual_seed(1)
    _evaluate(parts, 0, 1)
    parts.optimizer.step(lambda: _evaluate(parts, 2))
    assert not differences(parts.world(), whole.world())


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize("door", ["step", "passes"])
def test_replay_makes_accumulation_equal_a_closure_over_all_micro_batches(row, door):
    """Without dropout, for which integrations also replay the random numbers."""
    whole, parts = Run(row), Run(row)
    for run in (whole, parts):
        run.model.forward = lambda x, net=run.model: net.head(torch.tanh(net.norm(net.hidden(x))))
    calls = []
    for step in range(0, 27, 3):
        whole.optimizer.step(lambda step=step: _evaluate(whole, step, step + 1, step + 2))
        parts.optimizer.zero_grad()
        parts.optimizer.begin_step()
        _evaluate(parts, step, step + 1)

        def replay(step=step):
            calls.append(step)
            _evaluate(parts, step, step + 1)

        if door == "step":
            parts.optimizer.step(lambda step=step: _evaluate(parts, step + 2), replay=replay)
        else:
            with parts.optimizer.passes(accumulated=True) as passes:
                for _ in passes:
                    if passes.replays:
                        replay()
                    _evaluate(parts, step + 2)
    assert not differences(parts.world()["model"], whole.world()["model"])
    assert not differences(parts.state(), whole.state())
    assert len(calls) == parts.optimizer.telemetry.evaluations - parts.optimizer.telemetry.steps


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_kept_micro_batches_see_their_dropout_again(row):
    whole, parts = Run(row), Run(row)
    pending = MicroBatches(parts.optimizer)
    random = torch.get_rng_state()
    for step in range(0, 9, 3):
        whole.optimizer.step(lambda step=step: _evaluate(whole, step, step + 1, step + 2))
    expected = whole.world()
    torch.set_rng_state(random)
    for step in range(9):
        take = pending.step if step % 3 == 2 else pending.accumulate
        take(lambda step=step: _evaluate(parts, step))
    assert not differences(parts.world(), expected)
    assert not differences(parts.state(), whole.state())


LOOKING_AHEAD = pytest.mark.parametrize("row", [case("msam"), ADAPTIVE], ids=str)


@LOOKING_AHEAD
def test_gradients_of_another_point_are_refused(row):
    """The first gradient is taken ahead along the momentum, and these were not."""
    run = Run(row)
    run.train(0)
    run.optimizer.zero_grad()
    _evaluate(run, 1)
    world = run.world()
    with pytest.raises(cflat.ClosureError, match=r"takes its first gradient at other weights.*begin_step"):
        run.optimizer.step(run.closure(2), replay=lambda: _evaluate(run, 1))
    assert not differences(run.world(), world)


@LOOKING_AHEAD
@pytest.mark.parametrize("ending", ["give_up_step", "state_dict", "start_task", "deleted"])
def test_a_step_that_was_begun_and_given_up_leaves_no_trace(row, ending):
    run = Run(row)
    run.train(0, 1)
    run.optimizer.zero_grad()
    world, state = run.world(), run.state()
    run.optimizer.begin_step()
    assert run.optimizer.has_begun_step
    assert differences(run.world(), world)
    _evaluate(run, 2)
    if ending == "deleted":
        run.optimizer._begun = None
    else:
        getattr(run.optimizer, ending)(*([0] if ending == "start_task" else []))
    assert not run.optimizer.has_begun_step
    assert not differences(run.world(), world)
    assert all(param.grad is None for param in run.model.parameters())
    found = differences(run.state(), state)
    assert ending == "start_task" or found in ([], ["/wrapper/memories/v/norm"])  # of MSAM, read while moving


@LOOKING_AHEAD
def test_a_step_that_was_begun_twice_or_for_nothing_is_an_ordinary_step(row):
    plain, run = Run(row), Run(row)
    random = torch.get_rng_state()
    plain.train(0, 1, 2, 3)
    expected = plain.world()
    torch.set_rng_state(random)
    for step in range(4):
        run.optimizer.zero_grad()
        run.optimizer.begin_step()
        run.optimizer.begin_step()
        run.train(step)
    assert not differences(run.world(), expected)
    assert not differences(run.state(), plain.state())


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize("door", DOORS)
def test_an_evaluation_without_backward_is_refused(row, door):
    run = Run(row)
    run.train(0, 1)
    world, state = run.world(), run.state()
    with pytest.raises(cflat.ClosureError, match=r"Evaluation 1 of this step left no gradient.*loss\.backward\(\)"):
        walk(door, run.optimizer, lambda: _loss(run, 2))
    assert not differences(run.world(), world)
    assert all(path.endswith("/norm") for path in differences(run.state(), state))


def test_a_later_evaluation_without_backward_is_refused():
    run = Run(case("sam"))
    evaluations = iter([run.closure(0), lambda: None])
    with pytest.raises(cflat.ClosureError, match="Evaluation 2 of this step left no gradient"):
        run.optimizer.step(lambda: next(evaluations)())


def test_nothing_to_train_is_no_mistake():
    layer = nn.Linear(2, 2).requires_grad_(False)
    optimizer = cflat.CFlat(torch.optim.SGD(layer.parameters(), lr=0.1))
    optimizer.step(lambda: layer(torch.ones(1, 2)).sum())
    assert optimizer.telemetry.steps == 1


def test_a_loop_that_was_forgotten_is_refused():
    run = Run(case("c_flat"))
    with pytest.raises(cflat.ClosureError, match=r"left without its loop.*for _ in passes"), run.optimizer.passes():
        run.closure(0)()
    with pytest.raises(KeyError), run.optimizer.passes():  # an exception of the caller's own comes first
        raise KeyError
    assert run.optimizer.telemetry.steps == 0


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_step_directly_after_passes_does_nothing(row):
    plain, run = Run(row), Run(row)
    plain.train(0, 1, 2)
    expected, state = plain.world()["model"], plain.state()
    torch.manual_seed(7)
    run.model.load_state_dict(Run(row).model.state_dict())
    scheduler = torch.optim.lr_scheduler.ConstantLR(run.optimizer, factor=1.0)  # patches step
    calls = []
    run.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    run.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for step in range(3):
        for _ in run.optimizer.passes():
            run.closure(step)()
        assert run.optimizer.step() is None
        scheduler.step()
    assert calls == ["pre", "post"] * 3
    assert not differences(run.world()["model"], expected)
    assert not differences(run.state()["wrapper"], state["wrapper"])


@pytest.mark.parametrize("between", ["step()", "step(closure)", "left early"])
def test_only_one_call_directly_after_passes_does_nothing(between):
    run = Run(case("sam"))
    for _ in run.optimizer.passes():
        run.closure(0)()
    if between == "step()":
        run.optimizer.step()
    elif between == "step(closure)":
        run.train(1)
    else:
        for _ in run.optimizer.passes():
            break
    with pytest.raises(cflat.ClosureError, match="needs a closure"):
        run.optimizer.step()


@pytest.mark.parametrize("change", ["clip", "accumulate"])
def test_a_change_of_gradients_after_passes_is_not_silent(change):
    run = Run(case("c_flat"))
    for _ in run.optimizer.passes():
        run.closure(0)()
    if change == "clip":
        nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
    else:
        _evaluate(run, 1)
    with pytest.raises(cflat.ClosureError, match=r"has stepped already.*StepOptions\(max_norm"):
        run.optimizer.step()
