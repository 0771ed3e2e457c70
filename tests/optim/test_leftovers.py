"""Never silently wrong: gradients from before the step, evaluations without backward, loops that were forgotten."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cflat
from cases import AWAY, case
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
    assert all(path.endswith("/norm") for path in differences(run.state(), state))  # of MSAM, read while moving
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


AT_THETA = [row for row in EVERY if row.name not in AWAY]


@pytest.mark.parametrize("row", AT_THETA, ids=str)
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
        _evaluate(parts, step, step + 1)

        def replay(index, step=step):
            calls.append(index)
            _evaluate(parts, step, step + 1)

        if door == "step":
            parts.optimizer.step(lambda step=step: _evaluate(parts, step + 2), replay=replay)
        else:
            with parts.optimizer.passes(accumulated=True) as passes:
                for index in passes:
                    if passes.replays:
                        replay(index)
                    _evaluate(parts, step + 2)
    assert not differences(parts.world()["model"], whole.world()["model"])
    assert not differences(parts.state(), whole.state())
    assert len(calls) == parts.optimizer.telemetry.evaluations - parts.optimizer.telemetry.steps
    assert 0 not in calls  # the accumulated gradients are the first evaluation


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_kept_micro_batches_see_their_data_and_dropout_again(row):
    """Also those of MSAM, whose only evaluation is elsewhere: it evaluates them a second time."""
    whole, parts = Run(row), Run(row)
    pending = MicroBatches(parts.optimizer)
    random = torch.get_rng_state()
    for step in range(0, 9, 3):
        whole.optimizer.step(lambda step=step: _evaluate(whole, step, step + 1, step + 2))
    expected = whole.world()
    torch.set_rng_state(random)
    for step in range(9):
        take = pending.step if step % 3 == 2 else pending.accumulate
        take(lambda own: _evaluate(parts, own), step)
    assert not differences(parts.world(), expected)
    assert not differences(parts.state(), whole.state())


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_between_micro_batches_the_weights_are_those_of_the_last_step(row):
    """What is evaluated or saved there must not be where the next step will take its gradients."""
    run = Run(row)
    run.train(0, 1)
    world, state = run.world()["model"], run.state()
    MicroBatches(run.optimizer).accumulate(lambda step: _evaluate(run, step), 2)
    weights = {name: value for name, value in run.world()["model"].items() if "running" not in name}
    assert not differences({key: weights[key] for key in ("hidden.weight", "head.bias")}, {
        key: world[key] for key in ("hidden.weight", "head.bias")
    })  # fmt: skip
    assert not differences(run.state(), state)


@pytest.mark.parametrize("name", ["none", "c_flat", *AWAY])
@pytest.mark.parametrize("fault", ["nan", "exception"])
def test_an_accumulated_step_that_is_not_taken_leaves_no_trace_in_buffers(name, fault):
    """Those of the micro-batches before the last included, which were evaluated before the step began."""
    run = Run(case(name))
    run.train(0, 1)
    before = run.world()["model"]
    pending = MicroBatches(run.optimizer)
    if fault == "nan":
        pending.accumulate(lambda inputs: run.model(inputs).sum().backward(), torch.full((8, 5), torch.nan))
        pending.step(lambda step: _evaluate(run, step), 3)
        assert run.optimizer.telemetry.nonfinite == 1
    else:
        pending.accumulate(lambda step: _evaluate(run, step), 2)
        with pytest.raises(ZeroDivisionError):
            pending.step(lambda step: (_evaluate(run, step), 1 / 0), 3)
    assert not differences(run.world()["model"], before)
    pending.accumulate(lambda step: _evaluate(run, step), 4)
    pending.step(lambda step: _evaluate(run, step), 5)
    assert run.model.norm.num_batches_tracked == before["norm.num_batches_tracked"] + 2


@pytest.mark.parametrize("position", [0, 1])
def test_a_micro_batch_that_raises_is_in_no_evaluation(position):
    """A loop may catch an error (out of memory) and go on with the next micro-batch."""
    whole, parts = Run(case("c_flat")), Run(case("c_flat"))
    random = torch.get_rng_state()
    whole.optimizer.step(lambda: _evaluate(whole, 0, 1))
    expected = whole.world()
    torch.set_rng_state(random)
    pending = MicroBatches(parts.optimizer)
    failures = []

    def fail_once(step):
        if not failures:
            failures.append(step)
            raise MemoryError
        _evaluate(parts, step)

    for index in range(2):
        if index == position:
            with pytest.raises(MemoryError):
                pending.accumulate(fail_once, 7)
        else:
            pending.accumulate(lambda step: _evaluate(parts, step), 0)
    pending.step(lambda step: _evaluate(parts, step), 1)
    assert not differences(parts.world(), expected)


def test_a_micro_batch_must_be_an_argument():
    """A function that looks a loop variable up would see the newest batch when it is called again."""
    pending = MicroBatches(Run(case("sam")).optimizer)
    for take in (pending.accumulate, pending.step, pending.keep):
        with pytest.raises(TypeError, match="batch"):
            take(lambda: None)


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
