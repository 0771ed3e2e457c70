"""Parameters that are frozen, unused, added or without gradient: never touched when they should not be."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cflat
from faults import DOORS, EVERY, Run, walk


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_frozen_and_unused_weights_rest(row):
    """Momentum and weight decay would move them if anything left a gradient behind."""
    run = Run(row)
    run.optimizer.start_task(0, num_tasks=2)
    run.train(0, 1, 2)
    assert torch.equal(run.model.unused, torch.ones(4))
    run.model.hidden.requires_grad_(False)
    run.optimizer.start_task(1, num_tasks=2)
    before = run.model.hidden.weight.detach().clone(), run.model.hidden.bias.detach().clone()
    head = run.model.head.bias.detach().clone()
    run.train(*range(3, 10))
    assert torch.equal(run.model.hidden.weight, before[0])
    assert torch.equal(run.model.hidden.bias, before[1])
    assert not torch.equal(run.model.head.bias, head)


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_a_layer_frozen_in_the_middle_of_a_task_rests(row):
    run = Run(row)
    run.train(0, 1, 2)
    run.model.hidden.weight.requires_grad_(False)
    before = run.model.hidden.weight.detach().clone()
    run.train(3, 4, 5)
    assert torch.equal(run.model.hidden.weight, before)
    run.model.hidden.weight.requires_grad_(True)
    run.train(6, 7)
    assert not torch.equal(run.model.hidden.weight, before)
    assert run.optimizer.telemetry.nonfinite == 0


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_gradients_come_and_go_between_passes_and_steps(row):
    """The first pass decides who takes part; whoever vanishes later counts as zero, whoever appears is ignored."""
    first, second = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([3.0]))
    optimizer = row.make(torch.optim.SGD([first, second], lr=0.01))
    for step in range(12):
        before = first.detach().clone(), second.detach().clone()
        used = [[first, second], [first], [second]][step % 3]
        for index in optimizer.passes():
            if index > 0:
                assert all(
                    torch.equal(p, old) for p, old in zip((first, second), before, strict=True) if _absent(p, used)
                )
            present = used if index == 0 else [[first], [second], [first, second]][(step + index) % 3]
            sum(p.square().sum() for p in present).backward()
        assert all(torch.equal(p, old) for p, old in zip((first, second), before, strict=True) if _absent(p, used))
    assert optimizer.telemetry.nonfinite == 0
    assert torch.isfinite(first).all()
    assert torch.isfinite(second).all()


def _absent(param, params) -> bool:
    return all(param is not other for other in params)


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize("door", DOORS)
def test_a_step_without_any_gradient_is_refused_and_changes_nothing(row, door):
    run = Run(row)
    run.train(0, 1)
    before = [param.detach().clone() for param in run.model.parameters()]
    with pytest.raises(cflat.ClosureError, match=r"left no gradient in any parameter.*Call loss.backward\(\)"):
        walk(door, run.optimizer, lambda: None)
    assert all(torch.equal(p, old) for p, old in zip(run.model.parameters(), before, strict=True))
    assert run.optimizer.telemetry.steps == 2
    run.train(2, 3)


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_storage_never_changes(row):
    run = Run(row)
    pointers = [param.data_ptr() for param in run.model.parameters()]
    for step in range(5):
        for _ in run.optimizer.passes():
            assert [param.data_ptr() for param in run.model.parameters()] == pointers
            run.closure(step)()
    assert [param.data_ptr() for param in run.model.parameters()] == pointers


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize("width", [1, 40], ids=["small", "large"])
def test_a_head_that_grows_is_trained(row, width):
    """In the middle of a task and at its start; a large addition makes cached directions worthless, a small one not."""
    body, head = nn.Linear(5, 6), nn.Linear(6, 3)
    optimizer = row.make(torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.05, momentum=0.9))
    inputs, labels = torch.randn(8, 5), torch.arange(8) % 3
    heads = [head]

    def closure():
        features = torch.tanh(body(inputs))
        F.cross_entropy(torch.cat([head(features) for head in heads], dim=1), labels).backward()

    for _ in range(4):
        optimizer.step(closure)
    for is_new_task in (False, True):
        heads.append(nn.Linear(6, width))
        optimizer.add_param_group({"params": list(heads[-1].parameters())})
        if is_new_task:
            optimizer.start_task(1, num_tasks=2)
        before = heads[-1].weight.detach().clone()
        for _ in range(6):
            optimizer.step(closure)
        assert not torch.equal(heads[-1].weight, before)
    assert len(optimizer.base.param_groups) == 3
    assert optimizer.telemetry.nonfinite == 0


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_a_parameter_that_changes_its_shape_is_trained(row):
    """Some continual learners enlarge a layer by assigning new data to the same parameter."""
    layer = nn.Linear(4, 2, bias=False)
    optimizer = row.make(torch.optim.SGD(layer.parameters(), lr=0.05))
    for width in (2, 3, 5):
        layer.weight.data = torch.ones(width, 4)
        inputs = torch.randn(6, 4)
        for _ in range(3):
            optimizer.step(lambda inputs=inputs: layer(inputs).square().mean().backward())
        assert layer.weight.shape == (width, 4)
        assert not torch.equal(layer.weight, torch.ones(width, 4))


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_groups_may_be_replaced_between_tasks(row):
    """Avalanche rewrites param_groups; what is gone is neither moved nor remembered."""
    old, new = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = row.make(torch.optim.SGD([old], lr=0.1, momentum=0.9))
    for _ in range(3):
        optimizer.step(lambda: old.square().sum().backward())
    frozen = old.detach().clone()
    optimizer.param_groups[0]["params"] = [new]
    for _ in range(3):
        for _ in optimizer.passes():
            assert torch.equal(old, frozen)
            (new.square().sum() + old.sum()).backward()
    assert torch.equal(old, frozen)
    assert not torch.equal(new, torch.ones(2))
