"""Random SAM: how far filters move, and on what the noise depends."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import cflat
from cases import CONV, MLP, closure_of, train


def moves(optimizer: cflat.SharpnessAware, model: nn.Module, problem=MLP, step: int = 0) -> list[Tensor]:
    """Take a step and return by how much each parameter was away in its only evaluation."""
    before = [param.detach().clone() for param in model.parameters()]
    found = []
    for _ in optimizer.passes():
        found += [param.detach() - old for param, old in zip(model.parameters(), before, strict=True)]
        closure_of(model, problem.batch(step))()
    return found


def made(model: nn.Module, **settings) -> cflat.RandomSAM:
    return cflat.RandomSAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model, **settings)


def test_filters_move_by_their_own_norm_and_biases_rest():
    model = CONV.model()
    squares: dict[int, Tensor] = {}
    for seed in range(200):
        base = torch.optim.SGD(model.parameters(), lr=0.0)
        for index, move in enumerate(moves(cflat.RandomSAM(base, rho=0.3, seed=seed), model, CONV)):
            own = move.flatten(1).square().sum(1) if move.ndim > 1 else move.abs().sum()
            squares[index] = squares.get(index, 0) + own
    for index, param in enumerate(model.parameters()):
        if param.ndim == 1:
            assert squares[index] == 0
        else:
            ratio = (squares[index] / 200).sqrt() / (0.3 * param.detach().flatten(1).norm(dim=1))
            assert ((ratio - 1).abs() < 0.1).all()


def test_noise_is_new_in_every_step_and_task_and_with_every_seed():
    model = MLP.model()
    optimizer = made(model, rho=0.1)
    first, second = moves(optimizer, model)[0], moves(optimizer, model, step=1)[0]
    optimizer.start_task(1)
    other_task = moves(optimizer, model)[0]
    other_seed = moves(made(model, rho=0.1, seed=1), model)[0]
    kinds = [first, second, other_task, other_seed]
    units = torch.stack([kind.flatten() / (kind.norm() + 1e-12) for kind in kinds])
    assert (units @ units.T - torch.eye(4)).abs().max() < 0.6


def test_the_global_generator_is_left_alone():
    model = MLP.model()
    torch.manual_seed(4)
    before = torch.get_rng_state()
    train(made(model, rho=0.1), model, MLP, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_radius_grows_along_half_a_cosine():
    model = MLP.model()
    base = torch.optim.SGD(model.parameters(), lr=0.0)
    growing = cflat.RandomSAM(base, model=model, rho=0.2, total_steps=4)
    constant = cflat.RandomSAM(base, model=model, rho=0.2)
    factors = []
    for step in range(6):
        own, whole = moves(growing, model, step=step)[0], moves(constant, model, step=step)[0]
        factors.append((own.norm() / whole.norm()).item())
    assert factors == pytest.approx([0, 0.146447, 0.5, 0.853553, 1, 1], abs=1e-6)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_a_weight_without_elements_is_left_alone(shape):
    model = MLP.model()
    params = [*model.parameters(), nn.Parameter(torch.zeros(shape, dtype=torch.float64))]
    optimizer = cflat.RandomSAM(torch.optim.SGD(params, lr=0.1), rho=0.1)
    optimizer.step(lambda: (closure_of(model, MLP.batch(0))(), params[-1].sum().backward()))
    assert optimizer.telemetry.last["sharpness"] == "refreshed"
    assert all(param.isfinite().all() for param in params)
