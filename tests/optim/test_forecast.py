"""What only C-Flat Forecast has: an error that is measured, a budget that is kept, and bounds on what is measured."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cflat
from cases import BASES, FORECAST, FORECAST_VARIANTS, MLP, Case, closure_of, flat_weights, loss_of, train
from cflat.optim._surrogate import Products, surrogate_errors
from reference import REFERENCES, ReferenceTrainer


def forecast(dtype: torch.dtype = torch.float64, **keywords) -> tuple[torch.nn.Module, cflat.CFlatForecast]:
    model = MLP.model(dtype)
    return model, cflat.CFlatForecast(BASES["sgd"](model), model=model, **keywords)


# -- the error -----------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.floats(-1, 2), st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_errors_follow_from_inner_products(seed: int, a: float, c: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    g, d, u = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    u /= u.norm()
    products = Products(*(value.item() for value in (g.norm(), d.norm(), d @ g, d @ u, g @ u)))
    error, orthogonal = surrogate_errors(products, a, c)
    difference = a * g + c * g.norm() * u - d
    across = difference - (difference @ g) / (g @ g) * g
    v = d - (d @ g) / (g @ g) * g
    assert error == pytest.approx((difference.norm() / d.norm()).item(), rel=1e-9)
    assert orthogonal == pytest.approx((across.norm() / v.norm()).item(), rel=1e-6)


def test_plain_training_has_error_one_and_the_truth_none() -> None:
    assert surrogate_errors(Products(g=2.0, d=0.3, dg=0.1, du=0.05, gu=0.4), 0.0, 0.0) == pytest.approx((1.0, 1.0))
    assert surrogate_errors(Products(g=3.0, d=0.3, dg=0.9), 0.1, 0.0) == pytest.approx((0.0, 0.0), abs=1e-12)
    small = Products(g=1.0, d=math.hypot(0.1, 1e-7), dg=0.1, du=1e-7, gu=0.0)
    assert surrogate_errors(small, 0.1, 1e-7)[0] < 1e-7  # squares of the whole would leave their rounding, 1e-8


@pytest.mark.parametrize("row", [FORECAST, *FORECAST_VARIANTS], ids=str)
def test_telemetry_has_the_errors_of_the_reference(row: Case) -> None:
    model, copy = MLP.model(), MLP.model()
    optimizer = row.make(BASES["sgd"](model), model=model)
    trainer = ReferenceTrainer(copy, BASES["sgd"](copy), REFERENCES[row.name](**row.settings), loss_of)
    measured = []
    for step in range(60):
        optimizer.step(closure_of(model, MLP.batch(step)))
        trainer.step(MLP.batch(step))
        if "error" in optimizer.telemetry.last:
            measured.append(optimizer.telemetry.last["error"])
    assert len(measured) == optimizer.telemetry.surrogate.count > 5
    assert measured == pytest.approx(trainer.algorithm.e, rel=1e-7)
    assert optimizer.telemetry.surrogate.mean == pytest.approx(sum(measured) / len(measured))


def test_a_linear_gradient_field_is_forecast_well() -> None:
    """On a quadratic bowl d is parallel to g, of constant ratio once |g| is."""
    weights = torch.nn.Parameter(torch.full((8,), 3.0, dtype=torch.float64))
    optimizer = cflat.CFlatForecast(torch.optim.SGD([weights], lr=1e-4), rho=0.01)
    for _ in range(100):
        optimizer.step(lambda: _backward(0.5 * weights.square().sum()))
    assert optimizer.telemetry.surrogate.mean < 0.05


def _backward(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss


def test_useless_forecasts_are_left_out() -> None:
    """Gradients that have nothing to do with each other cannot be forecast; then a step in between is plain."""
    model, optimizer = forecast(rho=0.5, evaluations=1.6)
    taken = []
    for step in range(150):
        train(optimizer, model, MLP, 1, start=step)
        taken.append(optimizer.telemetry.last["sharpness"])
    assert set(taken) == {"refreshed", "reused", "skipped"}


def test_nothing_leaves_a_task() -> None:
    model, optimizer = forecast()
    fresh = optimizer.extra_state()
    train(optimizer, model, MLP, 20)
    optimizer.start_task(1, num_tasks=2)
    assert optimizer.extra_state() == fresh
    assert train(optimizer, model, MLP, 1, start=20) == [4]
    assert "error" not in optimizer.telemetry.last  # the first refresh of a task has nothing to be compared with


# -- budgets -------------------------------------------------------------------------------------------------


@given(st.floats(1.01, 4.0), st.integers(1, 120))
@settings(max_examples=25, deadline=None)
def test_a_budget_is_never_exceeded_but_by_the_first_refresh(budget: float, num_steps: int) -> None:
    model, optimizer = forecast(evaluations=budget, rho=0.1)
    spent = 0
    for step, count in enumerate(train(optimizer, model, MLP, num_steps), start=1):
        spent += count
        assert spent <= budget * step + 3 + 1e-6


@pytest.mark.parametrize("budget", [1.15, 1.3, 2.0, 3.0])
def test_a_budget_is_used(budget: float) -> None:
    model, optimizer = forecast(evaluations=budget)
    train(optimizer, model, MLP, 200)
    assert budget - 0.03 < optimizer.telemetry.evaluations_per_step < budget + 0.02


def test_asking_for_the_price_changes_nothing() -> None:
    model, optimizer = forecast()
    train(optimizer, model, MLP, 7)
    before = optimizer.extra_state()
    assert len({optimizer.price() for _ in range(50)}) == 1
    assert optimizer.extra_state() == before


@pytest.mark.parametrize(("budget", "exact"), [(1.3, 1), (2.0, 1), (2.5, 25)])
def test_refreshes_are_exact_at_the_start_and_where_the_budget_is_rich(budget: float, exact: int) -> None:
    model, optimizer = forecast(evaluations=budget)
    train(optimizer, model, MLP, 100)
    assert optimizer.telemetry.flatness.refreshed == exact


# -- what is measured from differences near rounding ---------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("curvature", [0.0, 1e-12, 1e-8, 1e-5])
@pytest.mark.parametrize("settings", [{}, {"rho_fd": 1e-4}, {"rho": 1e-4, "evaluations": 2.0}], ids=str)
def test_hardly_any_curvature_is_plain_training(dtype: torch.dtype, curvature: float, settings) -> None:
    """Differences of gradients are rounding here, and so would be their ratios: 447,207 was one of them."""

    def end(make) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        slope = torch.randn(40, generator=generator).to(dtype)
        weights = torch.nn.Parameter(torch.randn(40, generator=generator).mul(0.1).to(dtype))
        optimizer = make(torch.optim.SGD([weights], lr=1e-3, momentum=0.9))

        def loss(inputs: torch.Tensor) -> torch.Tensor:
            return ((slope + inputs) * weights).sum() + curvature * (inputs * weights).sum() ** 2

        for _ in range(150):
            inputs = torch.randn(40, generator=generator).to(dtype)
            optimizer.step(lambda inputs=inputs: _backward(loss(inputs)))
        return weights.detach().double()

    plain = end(cflat.Plain)
    assert (end(lambda base: cflat.CFlatForecast(base, **settings)) - plain).norm() < 0.02 * plain.norm()


@pytest.mark.parametrize("rho", [1e-5, 1e-4, 1e-3])
def test_low_precision_and_a_small_radius_do_no_harm(rho: float) -> None:
    model, optimizer = forecast(torch.bfloat16, rho=rho, evaluations=2.0)
    plain = MLP.model(torch.bfloat16)
    train(optimizer, model, MLP, 60)
    train(cflat.Plain(BASES["sgd"](plain)), plain, MLP, 60)
    assert flat_weights(model).norm() < 2 * flat_weights(plain).norm()
    assert -1 <= optimizer.means["phi"] <= 2


def test_the_weight_of_the_flatness_term_may_be_that_of_groups_alone() -> None:
    (model, common), twin = forecast(lam=0.2), MLP.model()
    groups = [{"params": list(twin.parameters()), "lam": 0.2}]
    own = cflat.CFlatForecast(torch.optim.SGD(groups, lr=0.1, momentum=0.9), model=twin, lam=0.0)
    for net, optimizer in ((model, common), (twin, own)):
        optimizer.step(closure_of(net, MLP.batch(0)))
    assert own.means["phi"] == pytest.approx(common.means["phi"], rel=1e-9) != 0
