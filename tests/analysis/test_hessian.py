"""Curvature from Hessian-vector products against the dense Hessian."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from cflat.analysis.hessian import hessian_vector_product, spectrum_density, top_eigenvalues, trace

PROPERTY = settings(max_examples=100, deadline=None, derandomize=True)


def small_net(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    return model, torch.randn(20, 4, dtype=dtype), torch.randint(0, 3, (20,))


def net_loss(model: nn.Module, x: Tensor, y: Tensor):
    return lambda: nn.functional.cross_entropy(model(x), y)


def dense_hessian(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    names, params = zip(*model.named_parameters(), strict=True)

    def of_flat(flat: Tensor) -> Tensor:
        parts = flat.split([param.numel() for param in params])
        weights = {n: part.view(param.shape) for n, part, param in zip(names, parts, params, strict=True)}
        return nn.functional.cross_entropy(functional_call(model, weights, x), y)

    flat = torch.cat([param.detach().reshape(-1) for param in params])
    return torch.autograd.functional.hessian(of_flat, flat)


def quadratic(matrix: Tensor):
    """A weight whose loss has the given Hessian."""
    x = nn.Parameter(torch.linspace(-1, 1, len(matrix), dtype=matrix.dtype))
    return (lambda: 0.5 * x @ matrix @ x), [x]


def diagonal(*values: float):
    return quadratic(torch.diag(torch.tensor(values, dtype=torch.float64)))


def test_products_are_those_of_the_dense_hessian():
    model, x, y = small_net()
    params = list(model.parameters())
    hessian = hessian_vector_product(net_loss(model, x, y), params)
    vector = [torch.randn_like(param) for param in params]
    expected = dense_hessian(model, x, y) @ torch.cat([v.reshape(-1) for v in vector])
    for _ in range(2):  # the graph is kept for further products
        image = hessian(vector)
        torch.testing.assert_close(torch.cat([v.reshape(-1) for v in image]), expected, rtol=0, atol=1e-12)
    assert all(param.grad is None for param in params)


@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
def test_top_eigenvalues_and_vectors_are_those_of_the_dense_hessian(which):
    model, x, y = small_net()
    dense = dense_hessian(model, x, y)
    values = torch.linalg.eigvalsh(dense)
    key = {"largest": -values, "smallest": values, "magnitude": -values.abs()}[which]
    expected = values[key.argsort()][:6].tolist()
    eigen = top_eigenvalues(net_loss(model, x, y), list(model.parameters()), k=6, which=which, with_vectors=True)
    assert eigen.is_converged
    assert eigen.values == pytest.approx(expected, abs=1e-6)
    for value, residual, vector in zip(eigen.values, eigen.residuals, eigen.vectors, strict=True):
        flat = torch.cat([part.reshape(-1) for part in vector])
        assert flat.norm().item() == pytest.approx(1, abs=1e-12)
        assert (dense @ flat - value * flat).norm().item() == pytest.approx(residual, abs=1e-10)
        assert residual <= 1e-5 * values.abs().max().item()


def test_all_eigenvalues_of_a_small_net():
    model, x, y = small_net()
    size = sum(param.numel() for param in model.parameters())
    expected = torch.linalg.eigvalsh(dense_hessian(model, x, y)).flip(0).tolist()
    eigen = top_eigenvalues(net_loss(model, x, y), list(model.parameters()), k=size, max_products=size)
    assert eigen.values == pytest.approx(expected, abs=1e-10)


def test_single_precision_agrees_to_its_precision():
    model, x, y = small_net(torch.float32)
    values = torch.linalg.eigvalsh(dense_hessian(*(part.double() for part in (model, x)), y))
    model.float()
    eigen = top_eigenvalues(net_loss(model, x, y), list(model.parameters()))
    assert eigen.is_converged
    assert eigen.values == pytest.approx(values.flip(0)[:5].tolist(), abs=1e-6)


@PROPERTY
@given(
    st.lists(st.sampled_from([-2.0, 0.0, 0.5, 3.0]), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(0, 5),
    st.sampled_from(["largest", "smallest", "magnitude"]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_repeated_eigenvalues_come_with_their_multiplicity(values, k, seed, which, dtype):
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))[0]
    loss, params = quadratic((rotation @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ rotation.T).to(dtype))
    key = {"largest": lambda v: -v, "smallest": lambda v: v, "magnitude": lambda v: -abs(v)}[which]
    eigen = top_eigenvalues(loss, params, k=k, which=which, seed=seed)
    assert eigen.is_converged
    magnitude = abs if which == "magnitude" else float  # which of 2 and -2 comes first is open
    assert [magnitude(v) for v in eigen.values] == pytest.approx(
        [magnitude(v) for v in sorted(values, key=key)[:k]], abs=1e-5 if dtype == torch.float32 else 1e-9
    )


def test_the_limit_of_products_is_kept_and_said():
    loss, params = diagonal(*np.geomspace(1, 1.1, 200))
    eigen = top_eigenvalues(loss, params, k=3, max_products=10)
    assert not eigen.is_converged
    assert eigen.num_products <= 20  # one restart more than asked for
    assert len(eigen.values) < 3


def test_converges_with_few_products_on_a_spectrum_with_outliers():
    loss, params = diagonal(*np.linspace(-0.1, 0.1, 2000), 5.0, 7.0, 11.0)
    eigen = top_eigenvalues(loss, params, k=3)
    assert eigen.values == pytest.approx([11, 7, 5], abs=1e-6)
    assert eigen.num_products < 30


def test_trace_is_exact_for_a_diagonal_hessian():
    loss, params = diagonal(1.0, -2.0, 3.5, 0.0)
    estimate = trace(loss, params, samples=4)
    assert estimate.mean == 2.5
    assert estimate.error == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_trace_lies_within_its_stated_error(seed):
    model, x, y = small_net()
    dense = dense_hessian(model, x, y)
    estimate = trace(net_loss(model, x, y), list(model.parameters()), samples=200, seed=seed)
    # Hutchinson's variance is known: twice the squares off the diagonal.
    known = math.sqrt(2 * (dense.square().sum() - dense.diagonal().square().sum()).item() / 200)
    assert estimate.error == pytest.approx(known, rel=0.25)
    assert abs(estimate.mean - dense.trace().item()) < 3 * estimate.error
    assert len(set(estimate.samples)) > 100


def test_density_integrates_to_one_and_has_exact_moments_for_a_diagonal_hessian():
    values = np.linspace(-1, 2, 7)
    loss, params = diagonal(*values)
    density = spectrum_density(loss, params, probes=2, steps=20)
    assert np.trapezoid(density.density, density.grid) == pytest.approx(1, abs=1e-8)
    for order in range(6):
        assert density.moment(order) == pytest.approx(np.mean(values**order), abs=1e-10)
    bells = np.exp(-0.5 * ((np.array(density.grid)[:, None] - values) / density.sigma) ** 2)
    expected = bells.mean(axis=1) / (density.sigma * math.sqrt(2 * math.pi))
    np.testing.assert_allclose(density.density, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_density_is_that_of_the_dense_eigenvalues(dtype):
    model, x, y = small_net(dtype)
    dense = dense_hessian(*(part.double() for part in (model, x)), y)
    model.to(dtype)
    probes, sigma = 100, 0.05
    density = spectrum_density(net_loss(model, x, y), list(model.parameters()), probes=probes, steps=30, sigma=sigma)
    assert density.moment(0) == pytest.approx(1, abs=1e-10)
    for order in (1, 2, 3):
        power = torch.linalg.matrix_power(dense, order)
        off_diagonal = power - torch.diag(power.diagonal())
        error = math.sqrt(2 / probes) * off_diagonal.norm().item() / len(dense)  # of the mean over sign vectors
        assert abs(density.moment(order) - power.trace().item() / len(dense)) < 3 * error
    values = torch.linalg.eigvalsh(dense).numpy()
    bells = np.exp(-0.5 * ((np.array(density.grid)[:, None] - values) / sigma) ** 2)
    expected = bells.mean(axis=1) / (sigma * math.sqrt(2 * math.pi))
    assert np.trapezoid(np.abs(density.density - expected), density.grid) < 0.05


def test_a_grid_too_coarse_for_the_width_is_refused():
    loss, params = diagonal(0.0, 1.0)
    with pytest.raises(ValueError, match="finer than the grid of 11 points"):
        spectrum_density(loss, params, sigma=1e-3, points=11)


def test_unreached_linear_and_complex_weights():
    x = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    slope, unused = nn.Parameter(torch.ones(2, dtype=torch.float64)), nn.Parameter(torch.ones(3))
    z = nn.Parameter(torch.tensor([1.0 + 2.0j], dtype=torch.complex128))
    params = [unused, x, slope, z]

    def loss():
        return x.square().sum() + 3 * slope.sum() + 2 * (z.real * z.imag).sum()

    eigen = top_eigenvalues(loss, params, k=3)
    assert eigen.values == pytest.approx([2, 2, 2], abs=1e-9)
    assert top_eigenvalues(loss, params, k=1, which="smallest").values == pytest.approx([-2], abs=1e-9)
    assert trace(loss, params, samples=64).mean == pytest.approx(4, abs=2)
    zero = hessian_vector_product(lambda: 3 * slope.sum(), [slope, unused])
    assert all(not part.any() for part in zero([torch.ones(2, dtype=torch.float64), torch.ones(3)]))


def test_attention_can_be_differentiated_twice():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    eigen = top_eigenvalues(lambda: layer(x, x, x, need_weights=False)[0].square().mean(), list(layer.parameters()))
    assert eigen.is_converged
    assert eigen.values[0] > 0


def test_seeds_decide_and_global_randomness_is_untouched():
    model, x, y = small_net()
    loss, params = net_loss(model, x, y), list(model.parameters())
    before = torch.get_rng_state()
    first, again, other = (trace(loss, params, samples=3, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.samples != other.samples
    assert spectrum_density(loss, params, probes=1) == spectrum_density(loss, params, probes=1)
    assert top_eigenvalues(loss, params) == top_eigenvalues(loss, params)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("is_training", [True, False])
def test_buffers_and_dropout_of_a_model_are_guarded(is_training):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    model.train(is_training)
    x = torch.randn(16, 3, dtype=torch.float64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    for measure in (top_eigenvalues, trace, spectrum_density):
        measure(lambda: model(x).square().mean(), list(model.parameters()), model=model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_refusals_say_what_to_do():
    frozen = torch.zeros(2, 3)
    free = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"Parameter 1 of shape \(2, 3\) does not require a gradient; leave frozen"):
        trace(lambda: free.sum(), [free, frozen])
    with pytest.raises(ValueError, match="params is empty"):
        trace(lambda: free.sum(), [])
    with pytest.raises(ValueError, match=r"single number, got a tensor of shape \(2,\)"):
        trace(lambda: free * 2, [free])
    with pytest.raises(ValueError, match="does not depend on any parameter"):
        trace(lambda: free.detach().sum(), [free])
    with pytest.raises(ValueError, match="samples must be a whole number and at least 2"):
        trace(lambda: free.sum(), [free], samples=1)
    with pytest.raises(ValueError, match="max_products must be a whole number and at least 5"):
        top_eigenvalues(lambda: free.sum(), [free], max_products=4)


@pytest.mark.parametrize("measure", [top_eigenvalues, trace, spectrum_density])
def test_a_loss_without_finite_curvature_is_said_to_have_none(measure):
    x = nn.Parameter(torch.zeros(6))
    with pytest.raises(ArithmeticError, match="no finite curvature here"):
        measure(lambda: x.abs().pow(1.5).sum(), [x])


def test_works_where_gradients_are_switched_off():
    loss, params = diagonal(1.0, 4.0)
    with torch.no_grad():
        assert top_eigenvalues(loss, params, k=1).values == pytest.approx([4], abs=1e-9)
