"""PILOT, PyCIL and INFTY: learners that call `set_closure` and `step()`, and INFTY's own optimizer beside ours."""

from __future__ import annotations

import by_hand
import pytest
import torch
from infty.optim import C_Flat
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import cflat
from cases import case
from cflat.integrations.infty import InftyAdapter, as_closure
from faults import differences


def create_loss_fn(network, inputs, targets):
    """As in PILOT's learners: logits and a list of losses."""

    def loss_fn():
        logits = network(inputs)
        return logits, [F.cross_entropy(logits, targets), 0.01 * logits.square().mean()]

    return loss_fn


def learn(network, optimizer, num=6):
    """The loop of a PILOT learner that was prepared for INFTY; it does not know whose optimizer it has."""
    totals = []
    for inputs, targets in by_hand.batches(num):
        optimizer.set_closure(create_loss_fn(network, inputs, targets))
        _logits, losses = optimizer.step()
        totals.append(sum(losses).item())
    return totals


@pytest.mark.parametrize("row", by_hand.ROWS, ids=str)
def test_a_learner_equals_the_loop_by_hand(row):
    network, twin = by_hand.network(), by_hand.network()
    adapter, flat = InftyAdapter(by_hand.optimizer_for(row, network)), by_hand.optimizer_for(row, twin)
    schedulers = [lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (adapter.optimizer, flat)]
    for task in range(2):
        adapter.start_task(task, num_tasks=2)
        torch.manual_seed(task)
        totals = learn(network, adapter)
        ours = by_hand.snapshot(network, adapter.optimizer)
        flat.start_task(task, num_tasks=2)
        torch.manual_seed(task)

        def loss_of(batch):
            logits = twin(batch[0])
            return torch.stack([F.cross_entropy(logits, batch[1]), 0.01 * logits.square().mean()]).sum()

        expected = by_hand.train(flat, [[batch] for batch in by_hand.batches(6)], loss_of)
        assert totals == pytest.approx(expected, rel=1e-6)
        assert not differences(ours, by_hand.snapshot(twin, flat))
        for scheduler in schedulers:
            scheduler.step()


def test_the_same_learner_with_inftys_own_c_flat():
    """The two agree once INFTY's second perturbation has the radius rho; as shipped it has 1.0, as nobody sets it."""

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def learn_double(net, optimizer):
        for inputs, targets in by_hand.batches(5):
            optimizer.set_closure(create_loss_fn(net, inputs.double(), targets))
            optimizer.step()

    theirs, ours = network(), network()
    base = torch.optim.SGD(theirs.parameters(), lr=0.1)
    infty = C_Flat(theirs.parameters(), base, theirs, {"rho": 0.1, "lamb": 0.2})
    infty.grad_norm_rho = 0.1
    learn_double(theirs, infty)
    flat = cflat.CFlat(torch.optim.SGD(ours.parameters(), lr=0.1), model=ours, rho=0.1, lam=0.2)
    learn_double(ours, InftyAdapter(flat))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)
    assert flat.telemetry.evaluations == 20


def test_a_loss_function_is_a_closure():
    network = by_hand.network()
    flat = by_hand.optimizer_for(case("sam"), network)
    logits, losses = flat.step(as_closure(create_loss_fn(network, *by_hand.batches(1)[0])))
    assert logits.shape == (8, 3)
    assert len(losses) == 2


def test_what_cannot_work_is_refused():
    network = by_hand.network()
    adapter = InftyAdapter(by_hand.optimizer_for(case("sam"), network))
    with pytest.raises(cflat.ClosureError, match=r"set_closure\(loss_fn\) before every step"):
        adapter.step()
    adapter.set_closure(create_loss_fn(network, *by_hand.batches(1)[0]))
    with pytest.raises(cflat.ClosureError, match="delay=True"):
        adapter.step(delay=True)
    adapter.step()
    with pytest.raises(cflat.ClosureError, match="before every step"):
        adapter.step()
