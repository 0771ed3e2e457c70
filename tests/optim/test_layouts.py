"""Sparse gradients, complex parameters, mixed precisions and odd memory layouts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cases import BASES
from faults import EVERY


def _rows_of(step: int):
    return torch.tensor([[0, 1, 1], [2, 3, 0], [1, 4, 2]][step % 3])


def _train_table(row, base, sparse, num_steps=9):
    torch.manual_seed(0)
    table = nn.Embedding(6, 4, sparse=sparse)
    optimizer = row.make(base(table.parameters()))
    target = torch.randn(6, 4)
    for step in range(num_steps):
        rows = _rows_of(step)
        optimizer.step(lambda rows=rows: (table(rows) - target[rows]).square().sum().backward())
        assert table.weight.grad.is_sparse == sparse
    assert optimizer.telemetry.nonfinite == 0
    return table.weight.detach()


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_sparse_gradients_equal_dense_ones(row):
    def sgd(params):
        return torch.optim.SGD(params, lr=0.05)

    torch.testing.assert_close(_train_table(row, sgd, sparse=True), _train_table(row, sgd, sparse=False))


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_sparse_adam_is_a_base(row):
    torch.manual_seed(0)
    start = nn.Embedding(6, 4).weight.detach()
    trained = _train_table(row, lambda params: torch.optim.SparseAdam(list(params), lr=0.05), sparse=True)
    assert torch.equal(trained[5], start[5])  # a row that no batch contains
    assert not torch.equal(trained[1], start[1])


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_complex_parameters_equal_their_real_parts(row):
    torch.manual_seed(0)
    initial = torch.randn(3, 2, dtype=torch.complex128)
    matrix = torch.randn(4, 3, dtype=torch.complex128)
    as_complex = nn.Parameter(initial.clone())
    as_real = nn.Parameter(torch.view_as_real(initial).clone())
    first = row.make(torch.optim.SGD([as_complex], lr=0.05, momentum=0.9))
    second = row.make(torch.optim.SGD([as_real], lr=0.05, momentum=0.9))

    def loss(weight):
        return torch.log1p((matrix @ weight).abs().square()).sum()

    for _ in range(10):
        first.step(lambda: loss(as_complex).backward())
        second.step(lambda: loss(torch.view_as_complex(as_real)).backward())
    torch.testing.assert_close(torch.view_as_real(as_complex.detach()), as_real.detach(), rtol=1e-11, atol=1e-12)
    assert first.telemetry.evaluations == second.telemetry.evaluations


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_mixed_dtypes_train_together(row):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    params.append(nn.Parameter(torch.randn(2, dtype=torch.complex64)))
    optimizer = row.make(torch.optim.SGD(params, lr=0.05, momentum=0.9))

    def closure():
        loss = sum(torch.log1p(param.abs().square()).sum().double() for param in params)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(10)]
    assert losses[-1] < losses[0]
    assert optimizer.telemetry.nonfinite == 0
    assert [param.grad.dtype for param in params] == [param.dtype for param in params]


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_memory_formats_do_not_matter(row):
    def train(memory_format):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(8, 2))
        model.double().to(memory_format=memory_format)
        optimizer = row.make(BASES["sgd"](model))
        inputs = torch.randn(5, 3, 6, 6, dtype=torch.float64).to(memory_format=memory_format)
        for _ in range(6):
            optimizer.step(lambda: model(inputs).square().mean().backward())
        return [param.detach() for param in model.parameters()]

    for plain, last in zip(train(torch.contiguous_format), train(torch.channels_last), strict=True):
        torch.testing.assert_close(last, plain, rtol=1e-10, atol=1e-12, check_stride=False)


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_tied_and_scalar_parameters(row):
    weight, scale = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.tensor(1.5))
    optimizer = row.make(torch.optim.Adam([{"params": [weight]}, {"params": [scale], "lr": 0.01}], lr=0.05))
    inputs = torch.randn(4, 3)
    for _ in range(6):
        optimizer.step(lambda: (torch.tanh(inputs @ weight) @ weight.T * scale).square().mean().backward())
    assert torch.isfinite(weight).all()
    assert scale.shape == ()
