"""Gradients in storage that somebody else fills again: static buffers, views, and tensors that are held elsewhere."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from cases import case
from faults import DOORS, EVERY, Run, batch_of, differences, walk


def _by_hand(run, step, assign):
    """Return a closure that computes gradients without backward and hands each over through ``assign``."""
    params = [param for param in run.model.parameters() if param is not run.model.unused]
    inputs, labels = batch_of(step)

    def closure():
        loss = F.cross_entropy(run.model(inputs), labels)
        for param, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
            assign(param, gradient)
        return loss

    return closure


class Static:
    """One buffer per parameter, filled anew by every evaluation."""

    def __init__(self, kind):
        self.kind = kind
        self.buffers = {}

    def __call__(self, param, gradient):
        buffer = self.buffers.setdefault(param, torch.zeros_like(gradient))
        buffer.copy_(gradient)
        param.grad = {
            "same object": lambda: buffer,
            "alias": lambda: buffer.detach(),
            "view": lambda: buffer.view_as(buffer),
            "set": lambda: torch.empty(0, dtype=buffer.dtype).set_(buffer),
        }[self.kind]()


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize("kind", ["same object", "alias", "view", "set"])
def test_static_buffers_are_not_kept_as_they_are(row, kind):
    worlds = []
    for assign in (lambda param, gradient: setattr(param, "grad", gradient.clone()), Static(kind)):
        run = Run(row)
        for step in range(5):
            walk(DOORS[step % 2], run.optimizer, _by_hand(run, step, assign))
        worlds.append((run.world(), run.state()))
    assert not differences(*worlds)


def test_ordinary_gradients_are_not_copied(monkeypatch):
    """A copy of each would cost memory and time."""
    run = Run(EVERY[1])
    run.train(0)
    seen = []

    def closure():
        run.closure(1)()
        seen.append({param.grad.data_ptr() for param in run.model.parameters() if param.grad is not None})

    kept = []
    run.optimizer.register_gradient_hook(
        lambda evaluation: kept.append({t.data_ptr() for t in evaluation.gradient.tensors})
    )
    run.optimizer.step(closure)
    assert kept == seen


def _complex_problem():
    generator = torch.Generator().manual_seed(0)
    matrix, start = (torch.randn(3, 3, generator=generator, dtype=torch.complex128) for _ in range(2))
    param = torch.nn.Parameter(start)
    optimizer = case("c_flat").make(torch.optim.SGD([param], lr=0.01))
    return param, optimizer, lambda: (matrix @ param).abs().pow(3).sum()


def _assign_gradient(param, loss, assign):
    assign(param, torch.autograd.grad(loss(), param)[0])


@pytest.mark.parametrize("kind", ["same object", "alias", "view", "set"])
def test_static_buffers_of_complex_gradients_are_not_kept_as_they_are(kind):
    ends = []
    for assign in (lambda param, gradient: setattr(param, "grad", gradient.clone()), Static(kind)):
        param, optimizer, loss = _complex_problem()
        for _ in range(3):
            optimizer.step(partial(_assign_gradient, param, loss, assign))
        ends.append(param.detach().clone())
    assert torch.equal(*ends)


def test_ordinary_complex_gradients_are_not_copied():
    param, optimizer, loss = _complex_problem()
    seen, taken = [], []

    def closure():
        loss().backward()
        seen.append(param.grad.data_ptr())

    optimizer.register_gradient_hook(lambda evaluation: taken.append(evaluation.gradient.tensors[0].data_ptr()))
    optimizer.step(closure)
    assert taken == seen
