"""Sharpness and flatness against closed forms and against brute-force search in the plane."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cflat.analysis.sharpness import ascend_terms, measure_terms
from cflat.optim import ASAM, SAM

PROPERTY = settings(max_examples=25, deadline=None, derandomize=True)
ETA = 0.01


def bowl(x: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (x.square() + 9 * y.square() + 2 * x * y)


def rosenbrock(x: Tensor, y: Tensor) -> Tensor:
    return (1 - x).square() + 5 * (y - x.square()).square()


def hill(x: Tensor, y: Tensor) -> Tensor:
    """A bump whose top lies inside the ball, on a slope."""
    return 2 * torch.exp(-((x - 0.9).square() + (y - 0.6).square()) / 0.1) + 0.3 * x


def waves(x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(2 * x) * torch.cos(1.5 * y) + 0.2 * x * y


def saddle(x: Tensor, y: Tensor) -> Tensor:
    return x.square() - 1.5 * y.square() + 0.3 * x**3


PROBLEMS = [
    pytest.param(bowl, (0.0, 0.0), 0.5, id="bowl-at-its-minimum"),
    pytest.param(bowl, (0.7, -0.2), 0.3, id="bowl"),
    pytest.param(rosenbrock, (1.0, 1.0), 0.2, id="rosenbrock-at-its-minimum"),
    pytest.param(rosenbrock, (-0.5, 0.4), 0.4, id="rosenbrock"),
    pytest.param(hill, (0.8, 0.5), 0.4, id="hill-inside"),
    pytest.param(waves, (0.3, -0.4), 0.8, id="waves"),
    pytest.param(saddle, (0.1, 0.05), 0.5, id="saddle"),
]


def weights_and_loss(problem, place):
    """The two coordinates in tensors of their own, so that the algebra runs over several."""
    x, y = (nn.Parameter(torch.tensor([value], dtype=torch.float64)) for value in place)
    return (lambda: problem(x, y).sum()), [x, y]


def brute_force(problem, place, rho: float, adaptive: bool) -> tuple[float, float]:
    """Sharpness and flatness by evaluating a fine polar grid of the disk, or of the ellipse |eps / T| <= rho."""
    angles = torch.linspace(0, 2 * math.pi, 2881, dtype=torch.float64)
    radii = torch.linspace(0, rho, 401, dtype=torch.float64)
    scale = [abs(value) + ETA if adaptive else 1.0 for value in place]
    x = (place[0] + scale[0] * radii[:, None] * torch.cos(angles)).requires_grad_()
    y = (place[1] + scale[1] * radii[:, None] * torch.sin(angles)).requires_grad_()
    losses = problem(x, y)
    slopes = torch.autograd.grad(losses.sum(), [x, y])
    norms = sum((t * slope).square() for t, slope in zip(scale, slopes, strict=True)).sqrt()
    return (losses.max() - losses[0, 0]).item(), rho * norms.max().item()


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("problem", "place", "rho"), PROBLEMS)
def test_ascent_agrees_with_brute_force(problem, place, rho, adaptive):
    loss, params = weights_and_loss(problem, place)
    sharpness, flatness = brute_force(problem, place, rho, adaptive)
    terms = ascend_terms(loss, params, rho, steps=60, starts=5, adaptive=adaptive, eta=ETA)
    # A grid misses the maximum by the square of its spacing, and always from below.
    assert sharpness * (1 - 1e-9) <= terms.sharpness <= sharpness * (1 + 1e-4) + 1e-12
    assert flatness * (1 - 1e-9) <= terms.flatness <= flatness * (1 + 1e-4) + 1e-12
    assert terms.loss == loss().item()
    assert terms.sharpness <= terms.flatness * (1 + 1e-12)  # a mean value inequality, in both forms


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("problem", "place", "rho"), PROBLEMS)
def test_one_step_never_exceeds_the_ascent(problem, place, rho, adaptive):
    loss, params = weights_and_loss(problem, place)
    estimate = measure_terms(loss, params, rho, adaptive=adaptive)
    for steps, starts in ((1, 1), (10, 1), (10, 3)):
        found = ascend_terms(loss, params, rho, steps=steps, starts=starts, adaptive=adaptive)
        assert found.sharpness >= max(0.0, estimate.sharpness)
        assert found.flatness >= max(estimate.flatness, rho * estimate.gradient_norm)
        assert (found.loss, found.gradient_norm) == (estimate.loss, estimate.gradient_norm)


def test_one_step_is_exact_for_a_round_bowl_and_for_a_slope():
    x = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    terms = measure_terms(lambda: 0.5 * x.square().sum(), [x], 0.1)
    assert terms.loss == pytest.approx(12.5)
    assert terms.sharpness == pytest.approx(0.5 * (5.1**2 - 25))
    assert terms.flatness == pytest.approx(0.1 * 5.1)
    assert terms.gradient_norm == pytest.approx(5)
    slope = torch.tensor([2.0, -1.0], dtype=torch.float64)
    terms = measure_terms(lambda: slope @ x, [x], 0.1)
    assert terms.sharpness == pytest.approx(0.1 * math.sqrt(5))
    assert terms.flatness == pytest.approx(0.1 * math.sqrt(5))


@PROPERTY
@given(st.floats(-2, 2), st.floats(-2, 2), st.floats(0.01, 1), st.floats(0.1, 10), st.booleans())
def test_one_step_follows_the_formulas_of_the_paper(x, y, rho, stretch, adaptive):
    theta = torch.tensor([x, y], dtype=torch.float64)
    scale = theta.abs() + ETA if adaptive else torch.ones_like(theta)

    def gradient(at: Tensor) -> Tensor:
        at = at.clone().requires_grad_()
        return torch.autograd.grad(rosenbrock(at[0], stretch * at[1]), at)[0]

    g = gradient(theta)
    eps_0 = rho * scale**2 * g / ((scale * g).norm() + 1e-12)
    increment = gradient(theta + eps_0) - g
    eps_1 = rho * scale**2 * increment / ((scale * increment).norm() + 1e-12)
    moved = theta + eps_0
    rise = rosenbrock(moved[0], stretch * moved[1]) - rosenbrock(theta[0], stretch * theta[1])

    weights = nn.Parameter(theta.clone())
    terms = measure_terms(
        lambda: rosenbrock(weights[0], stretch * weights[1]), [weights], rho, adaptive=adaptive, eta=ETA
    )
    assert terms.sharpness == pytest.approx(rise.item(), rel=1e-9, abs=1e-9)
    assert terms.flatness == pytest.approx(rho * (scale * gradient(theta + eps_1)).norm().item(), rel=1e-7, abs=1e-9)
    assert terms.gradient_norm == pytest.approx((scale * g).norm().item())


@pytest.mark.parametrize(("optimizer", "adaptive"), [(SAM, False), (ASAM, True)])
def test_the_perturbed_point_is_that_of_the_optimizer(optimizer, adaptive):
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(5, 3, dtype=torch.float64)
    seen = []

    def closure():
        loss = model(x).square().sum().exp()
        loss.backward()
        seen.append(loss.item())
        return loss

    opt = optimizer(torch.optim.SGD(model.parameters(), lr=0.0), rho=0.2)
    opt.step(closure)
    terms = measure_terms(lambda: model(x).square().sum().exp(), list(model.parameters()), 0.2, adaptive=adaptive)
    assert terms.loss == seen[0]
    assert terms.sharpness == pytest.approx(seen[1] - seen[0], rel=1e-9)


def test_the_adaptive_form_ignores_how_scale_is_shared_between_layers():
    def terms(stretch: float, adaptive: bool):
        a, b = (nn.Parameter(torch.tensor([v], dtype=torch.float64)) for v in (1.5 * stretch, 0.8 / stretch))
        return measure_terms(lambda: (a * b - 1).square().sum(), [a, b], 0.1, adaptive=adaptive, eta=0.0)

    assert terms(7.0, True).sharpness == pytest.approx(terms(1.0, True).sharpness)
    assert terms(7.0, True).flatness == pytest.approx(terms(1.0, True).flatness)
    assert terms(7.0, False).sharpness > 2 * terms(1.0, False).sharpness


def test_random_starts_leave_a_minimum_where_the_gradient_says_nothing():
    loss, params = weights_and_loss(bowl, (0.0, 0.0))
    assert measure_terms(loss, params, 0.5).sharpness == 0.0
    assert ascend_terms(loss, params, 0.5, steps=100).sharpness > 1.0


def small_model() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    return model, torch.randn(32, 3)


@pytest.mark.parametrize("measure", [measure_terms, ascend_terms])
@pytest.mark.parametrize("is_training", [True, False])
def test_nothing_of_the_model_changes(measure, is_training):
    model, x = small_model()
    model.train(is_training)
    for param in model.parameters():
        param.grad = torch.full_like(param, 7.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    terms = measure(lambda: model(x).square().mean(), list(model.parameters()), 0.1, model=model)
    assert terms.sharpness > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all((param.grad == 7.0).all() for param in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training is is_training


def test_dropout_draws_one_mask_for_all_evaluations():
    model, x = small_model()
    tiny = measure_terms(lambda: model(x).square().mean(), list(model.parameters()), 1e-6, model=model)
    assert abs(tiny.sharpness) < 1e-4  # another mask would change the loss by far more
    with torch.no_grad():
        first, second = (model(x).square().mean().item() for _ in range(2))
    assert tiny.loss == first
    assert abs(first - second) > 1e-3


@PROPERTY
@given(st.integers(0, 20), st.booleans(), st.sampled_from([RuntimeError, KeyboardInterrupt]), st.booleans())
def test_an_exception_at_any_evaluation_restores_the_weights(at, adaptive, error, ascends):
    model, x = small_model()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calls = 0

    def loss():
        nonlocal calls
        calls += 1
        if calls > at:
            raise error("stop")
        return model(x).square().mean()

    params = list(model.parameters())
    if ascends:
        with pytest.raises(error):
            ascend_terms(loss, params, 0.1, adaptive=adaptive, steps=20, model=model)
    elif at < 3:
        with pytest.raises(error):
            measure_terms(loss, params, 0.1, adaptive=adaptive, model=model)
    else:
        measure_terms(loss, params, 0.1, adaptive=adaptive, model=model)
        assert calls == 3 <= at
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in params)


def test_complex_weights_count_as_pairs():
    z = nn.Parameter(torch.tensor([3.0 + 4.0j], dtype=torch.complex128))
    for measure in (measure_terms, ascend_terms):
        terms = measure(lambda: 0.5 * z.abs().square().sum(), [z], 0.1)
        assert terms.sharpness == pytest.approx(0.5 * (5.1**2 - 25))
        assert terms.flatness == pytest.approx(0.1 * 5.1)


def test_wrong_arguments_are_named():
    x = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="rho must be above 0, got 0"):
        measure_terms(lambda: x.sum(), [x], 0)
    with pytest.raises(ValueError, match="steps must be a whole number and at least 1, got 0"):
        ascend_terms(lambda: x.sum(), [x], 0.1, steps=0)
