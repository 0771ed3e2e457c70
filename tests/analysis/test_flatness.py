"""Flatness in two numbers: right on known curvature, and no trace left in a run."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import cflat
from cflat.analysis.flatness import measure_flatness
from cflat.analysis.hessian import top_eigenvalues


def test_a_parabola_has_its_own_curvature() -> None:
    theta = torch.tensor([3.0, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    curvature = torch.tensor([1.0, 5.0, 20.0], dtype=torch.float64)

    def loss() -> torch.Tensor:
        return 0.5 * (curvature * theta**2).sum()

    found = measure_flatness(loss, [theta], rho=0.1)
    g = curvature * theta.detach()
    moved = theta.detach() + 0.1 * g / g.norm()
    assert found.eigenvalue == pytest.approx(20.0, rel=1e-9)
    assert found.sharpness == pytest.approx(float(0.5 * (curvature * moved**2).sum()) - loss().item(), rel=1e-9)
    assert theta.tolist() == [3.0, -1.0, 0.5]


def test_a_network_agrees_with_the_exact_eigenvalue_to_a_percent() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.Tanh(), torch.nn.Linear(24, 3)).double()
    x, y = torch.randn(64, 6, dtype=torch.float64), torch.randint(0, 3, (64,))

    def loss() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(x), y)

    params = list(model.parameters())
    exact = top_eigenvalues(loss, params, 1).values[0]
    assert measure_flatness(loss, params).eigenvalue == pytest.approx(exact, rel=0.01)


def test_what_is_not_finite_has_no_flatness() -> None:
    theta = torch.tensor([0.0], requires_grad=True)
    found = measure_flatness(lambda: theta.sqrt().sum(), [theta])
    assert math.isnan(found.sharpness)
    assert math.isnan(found.eigenvalue)


def test_it_costs_three_forward_passes_and_what_the_products_cost() -> None:
    theta = torch.ones(2, requires_grad=True)
    calls = []

    def loss() -> torch.Tensor:
        calls.append(1)
        return (theta**3).sum()

    measure_flatness(loss, [theta], products=7)
    assert len(calls) == 3


@pytest.mark.parametrize("method", ["icarl", "simplecil"])
def test_measuring_changes_no_bit_of_a_run(method: str, tmp_path: Path) -> None:
    shared = {"method": method, "data": "digits", "preset": "smoke", "optimizer": "sam"}
    plain = cflat.bench.run(**shared, out=tmp_path / "plain")
    watched = cflat.bench.run(**shared, train__flatness=True, out=tmp_path / "watched")
    assert plain.summary.flatness == {}
    assert plain.summary.cost.evaluations == watched.summary.cost.evaluations
    np.testing.assert_array_equal(plain.accuracy, watched.accuracy)
    losses = [[record["loss"] for record in run.history() if "loss" in record] for run in (plain, watched)]
    assert losses[0] == losses[1]
    found = cflat.bench.load_run(tmp_path / "watched").summary.flatness
    assert set(found) == (set() if method == "simplecil" else {"sharpness", "eigenvalue"})  # it trains nothing
    assert all(math.isfinite(value) for value in found.values())
