"""What the loop over passes makes possible: accumulation, clipping, and telemetry that tells the truth."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from cases import BASES, MLP, case, flat_weights, loss_of
from cflat import StepOptions
from faults import EVERY, Run


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_micro_batches_equal_the_whole_batch(row):
    whole, parts = MLP.model(), MLP.model()
    first = row.make(BASES["sgd"](whole), model=whole)
    second = row.make(BASES["sgd"](parts), model=parts)
    for step in range(10):
        inputs, labels = MLP.batch(step)
        for _ in first.passes():
            loss_of(whole, (inputs, labels)).backward()
        for _ in second.passes():
            for micro in zip(inputs.split(3), labels.split(3), strict=True):
                (loss_of(parts, micro) / 4).backward()
    assert first.telemetry.evaluations == second.telemetry.evaluations
    torch.testing.assert_close(flat_weights(parts), flat_weights(whole), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize("clip", ["final", "each"])
def test_clipping_bounds_the_direction(row, clip):
    run = Run(row, options=StepOptions(max_norm=0.01, clip=clip))
    norms = []

    def measure(opt, args, kwargs):
        norms.append(torch.cat([p.grad.flatten() for p in run.model.parameters() if p.grad is not None]).norm().item())

    run.base.register_step_pre_hook(measure)
    run.train(*range(6))
    assert len(norms) == 6
    if clip == "final":
        assert max(norms) <= 0.01 * (1 + 1e-5)
        assert max(norms) >= 0.01 * (1 - 1e-5)
    else:
        assert max(norms) <= 0.01 * 5


def test_clipping_does_not_change_a_short_direction():
    plain, clipped = Run(case("c_flat")), None
    plain.train(0, 1, 2)
    clipped = Run(case("c_flat"), options=StepOptions(max_norm=1e6))
    clipped.train(0, 1, 2)
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), clipped.model.parameters(), strict=True))


def test_clipping_each_gradient_is_a_gradient_of_that_length():
    """For SAM the last gradient is the direction, so both ways agree; for C-Flat they do not."""
    weights = {}
    for name in ("sam", "c_flat"):
        for clip in ("final", "each"):
            run = Run(case(name), options=StepOptions(max_norm=0.1, clip=clip))
            run.train(0)
            weights[name, clip] = flat_weights(run.model)
    torch.testing.assert_close(weights["sam", "final"], weights["sam", "each"])
    assert not torch.allclose(weights["c_flat", "final"], weights["c_flat", "each"], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_telemetry_counts_what_happened(row):
    run = Run(row)
    calls = 0
    for step in range(9):
        for index in run.optimizer.passes():
            calls += 1
            last = index
            run.closure(step)()
        assert run.optimizer.telemetry.last["evaluations"] == last + 1
    telemetry = run.optimizer.telemetry
    assert (telemetry.steps, telemetry.evaluations) == (9, calls)
    assert telemetry.evaluations_per_step == calls / 9
    for branch in (telemetry.sharpness, telemetry.flatness):
        assert branch.refreshed + branch.reused + branch.skipped in (0, 9)


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_weight_decay_is_left_to_the_base(row):
    """A gradient of zero leaves exactly the base's decay."""
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = row.make(torch.optim.SGD([weight], lr=0.1, weight_decay=0.5))
    optimizer.step(lambda: (weight * 0.0).sum().backward())
    torch.testing.assert_close(weight.detach(), torch.tensor([0.95, -1.9]))


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_a_graph_that_is_kept_does_no_harm(row):
    """With create_graph the gradients carry a graph themselves; they are used as values."""
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = row.make(torch.optim.SGD([weight], lr=0.01))

    def closure():
        loss = F.softplus(weight).sum()
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        (loss + gradient.square().sum()).backward()

    for _ in range(5):
        optimizer.step(closure)
    assert not weight.grad.requires_grad
    assert torch.isfinite(weight).all()
