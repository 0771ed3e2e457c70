"""QHM against its formula and its relatives, alone; under the wrappers it is in the other files here."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import cflat
from cases import CONV, MLP, closure_of, flat_weights, loss_of


def _gradient(model: nn.Module, step: int) -> torch.Tensor:
    gradients = torch.autograd.grad(loss_of(model, MLP.batch(step)), list(model.parameters()))
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


def _write(model: nn.Module, theta: torch.Tensor) -> None:
    nn.utils.vector_to_parameters(theta, model.parameters())


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> torch.Tensor:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, MLP.batch(step)).backward()
        optimizer.step()
    return flat_weights(model)


@pytest.mark.parametrize(
    ("momentum", "nu", "decay"), [(0.9, 0.7, 0.0), (0.9, 0.7, 0.01), (0.0, 1.0, 0.1), (0.5, 0.0, 0.0)]
)
@pytest.mark.parametrize("maximize", [False, True])
def test_equals_the_formula(momentum, nu, decay, maximize):
    model, copied = MLP.model(), MLP.model()
    sign = -1 if maximize else 1
    m = torch.zeros_like(flat_weights(model))
    for step in range(60):
        g = sign * _gradient(copied, step) + decay * flat_weights(copied)
        m = momentum * m + (1 - momentum) * g
        _write(copied, flat_weights(copied) - 0.2 * ((1 - nu) * g + nu * m))
    settings = {"momentum": momentum, "nu": nu, "weight_decay": decay, "maximize": maximize}
    trained = _train(model, cflat.QHM(model.parameters(), 0.2, **settings), *range(60))
    torch.testing.assert_close(trained, flat_weights(copied), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("nu", "nesterov"), [(1.0, False), (0.9, True)], ids=["heavy-ball", "nesterov"])
def test_equals_torchs_momentum_at_a_tenth_of_the_rate(nu, nesterov):
    model, copied = MLP.model(), MLP.model()
    sgd = torch.optim.SGD(copied.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3, nesterov=nesterov)
    trained = _train(model, cflat.QHM(model.parameters(), 0.2, momentum=0.9, nu=nu, weight_decay=1e-3), *range(60))
    torch.testing.assert_close(trained, _train(copied, sgd, *range(60)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("s", "mu"), [(0.9, 0.9), (5.0, 0.9), (9.0, 0.9), (1.0, 0.5), (2.5, 0.8)])
def test_looking_ahead_is_qhm_with_averaged_weights(s, mu):
    """Gradients from s steps ahead along the momentum: v' = mu v + g(theta - s eta v), theta' = theta - eta v'."""
    eta, ahead = 0.01, MLP.model()
    theta, v = flat_weights(ahead), torch.zeros_like(flat_weights(ahead))
    model = MLP.model()
    optimizer = cflat.QHM(model.parameters(), eta / (1 - mu), momentum=mu, nu=1 - s * (1 - mu) / mu)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(s / (1 + s)))
    average.update_parameters(model)  # begins with the initial weights
    for step in range(300):
        _write(ahead, theta - s * eta * v)
        v = mu * v + _gradient(ahead, step)
        theta = theta - eta * v
        _train(model, optimizer, step)
        average.update_parameters(model)
    torch.testing.assert_close(flat_weights(average), theta, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(flat_weights(model), theta - s * eta * v, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("how", ["state_dict", "deepcopy", "pickle"])
def test_resumes_bit_for_bit(how):
    model = CONV.model(torch.float32)
    optimizer = cflat.QHM(model.parameters(), lr=0.3)

    def train(model, optimizer, *steps):
        for step in steps:
            optimizer.zero_grad()
            optimizer.step(closure_of(model, CONV.batch(step, torch.float32)))

    train(model, optimizer, 0, 1, 2)
    if how == "state_dict":
        twin = CONV.model(torch.float32, seed=1)
        twin.load_state_dict(model.state_dict())
        resumed = cflat.QHM(twin.parameters(), lr=1.0, nu=0.1)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        pair = (model, optimizer)
        twin, resumed = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    train(model, optimizer, 3, 4)
    train(twin, resumed, 3, 4)
    assert torch.equal(flat_weights(twin), flat_weights(model))
    assert all(set(state) == {"momentum_buffer"} for state in optimizer.state.values())


def test_groups_have_settings_of_their_own():
    model, copied = MLP.model(), MLP.model()
    first, *rest = model.parameters()
    groups = [{"params": [first], "nu": 0.0, "lr": 0.05}, {"params": rest, "momentum": 0.5}]
    _train(model, cflat.QHM(groups, lr=0.2), 0, 1, 2)
    first, *rest = copied.parameters()
    alone = [cflat.QHM([first], lr=0.05, nu=0.0), cflat.QHM(rest, lr=0.2, momentum=0.5)]
    for step in range(3):
        copied.zero_grad()
        loss_of(copied, MLP.batch(step)).backward()
        for optimizer in alone:
            optimizer.step()
    assert torch.equal(flat_weights(model), flat_weights(copied))


def test_a_rate_that_is_a_tensor_stays_on_its_device():
    model, copied = MLP.model(), MLP.model()
    rate = torch.tensor(0.2, dtype=torch.float64)
    optimizer = cflat.QHM(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    twin = cflat.QHM(copied.parameters(), 0.2)
    other = torch.optim.lr_scheduler.ExponentialLR(twin, 0.9)
    for step in range(10):
        torch.testing.assert_close(_train(model, optimizer, step), _train(copied, twin, step), rtol=1e-12, atol=1e-12)
        schedule.step()
        other.step()
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)


def test_meta_tensors_show_that_nothing_is_read_back():
    weight = nn.Parameter(torch.zeros(3, device="meta"))
    weight.grad = torch.zeros(3, device="meta")
    cflat.QHM([weight], lr=torch.tensor(0.1, device="meta"), weight_decay=0.1).step()  # any host read raises


def test_sparse_and_complex_gradients():
    tables = [nn.Embedding(6, 4, sparse=sparse).double() for sparse in (True, False)]
    tables[1].load_state_dict(tables[0].state_dict())
    for table in tables:
        optimizer = cflat.QHM(table.parameters(), lr=0.1)
        for rows in ([0, 1, 1], [2, 0, 3]):
            optimizer.zero_grad()
            table(torch.tensor(rows)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(tables[0].weight, tables[1].weight)

    whole = nn.Parameter(torch.randn(3, dtype=torch.complex128))
    parts = nn.Parameter(torch.view_as_real(whole.detach()).clone())
    first, second = cflat.QHM([whole], lr=0.1), cflat.QHM([parts], lr=0.1)
    for _ in range(3):
        whole.grad, parts.grad = whole.detach() * 2, parts.detach() * 2
        first.step()
        second.step()
    torch.testing.assert_close(torch.view_as_real(whole.detach()), parts.detach())


def test_parameters_without_a_gradient_are_left_alone():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = cflat.QHM([used, unused], lr=0.1, weight_decay=0.5)
    used.grad = torch.ones(2)
    assert optimizer.step(lambda: 7.0) == 7.0
    assert torch.equal(unused, torch.ones(2))
    assert unused not in optimizer.state


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -0.1}, r"lr must be at least 0, got -0\.1"),
        ({"lr": float("nan")}, "lr must be at least 0, got nan"),
        ({"lr": torch.ones(2)}, r"lr must be a number or a tensor with one element, got one of shape \(2,\)"),
        ({"momentum": 1.0}, r"momentum must be at least 0 and below 1, got 1\.0"),
        ({"nu": 1.1}, r"nu must be at least 0 and at most 1, got 1\.1"),
        ({"weight_decay": -1}, "weight_decay must be at least 0, got -1"),
        ({"maximize": 1}, "maximize must be True or False, got 1"),
    ],
)
def test_ranges_are_checked(settings, message):
    weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=message):
        cflat.QHM([weight], **{"lr": 0.1, **settings})
    if "maximize" not in settings:
        with pytest.raises(ValueError, match=message):
            cflat.QHM([{"params": [weight], **settings}], lr=0.1)
