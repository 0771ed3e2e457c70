"""Slices of known surfaces, filter normalisation, and barriers that can be computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cflat.analysis.hessian import top_eigenvalues
from cflat.analysis.landscape import connect, line, plane, random_direction

PROPERTY = settings(max_examples=30, deadline=None, derandomize=True)


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def small_net() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    return model, torch.randn(8, 3, 8, 8)


@PROPERTY
@given(
    st.lists(st.lists(st.integers(1, 4), max_size=4).map(tuple), min_size=1, max_size=4),
    st.integers(0, 2**31),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_each_filter_of_a_direction_is_as_long_as_that_of_the_weights(shapes, seed, with_vectors, dtype):
    generator = torch.Generator().manual_seed(seed)
    params = [10 * torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    direction = random_direction(params, seed=seed, with_vectors=with_vectors)
    for param, part in zip(params, direction, strict=True):
        assert (part.shape, part.dtype) == (param.shape, dtype)
        if param.dim() >= 2:
            torch.testing.assert_close(part.flatten(1).norm(dim=1), param.flatten(1).norm(dim=1), rtol=1e-5, atol=0)
        elif with_vectors:
            torch.testing.assert_close(part.norm(), param.norm(), rtol=1e-5, atol=0)
        else:
            assert not part.any()


def test_directions_depend_on_the_seed_alone():
    model, _ = small_net()
    params = list(model.parameters())
    state = torch.get_rng_state()
    first, again, other = (random_direction(params, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_filter_of_zeros_stays_where_it_is():
    weights = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    direction = random_direction([weights], seed=0)[0]
    assert direction[0].tolist() == [0, 0]
    assert direction[1].norm().item() == pytest.approx(5)


def test_a_line_through_a_parabola():
    x, y = parameter(1.0), parameter(2.0)
    direction = [torch.tensor([1.0]), torch.tensor([-2.0])]  # of lower precision than the weights
    found = line(lambda: (x.square() + y.square()).sum(), [x, y], direction, [-1, 0, 0.5])
    assert found.distances == [-1.0, 0.0, 0.5]
    assert found.losses == pytest.approx([16, 5, 3.25], rel=1e-15)


def test_a_plane_has_a_row_for_each_y():
    x, y = parameter(1.0), parameter(2.0)
    across, up = [torch.ones(1), torch.zeros(1)], [torch.zeros(1), torch.ones(1)]
    found = plane(lambda: (10 * x + y).sum(), [x, y], (across, up), [0, 1, 2], [0, 5])
    assert found.losses == [[12, 22, 32], [17, 27, 37]]
    assert (found.xs, found.ys) == ([0, 1, 2], [0, 5])


def test_a_line_along_an_eigenvector_bends_by_its_eigenvalue():
    model, x = small_net()
    model.double().eval()
    params = list(model.parameters())

    def loss() -> Tensor:
        return model(x.double()).square().mean()

    eigen = top_eigenvalues(loss, params, k=1, with_vectors=True)
    step = 1e-3
    left, middle, right = line(loss, params, eigen.vectors[0], [-step, 0, step]).losses
    assert (left - 2 * middle + right) / step**2 == pytest.approx(eigen.values[0], rel=1e-3)


def test_a_convex_bowl_has_no_barrier():
    x = parameter(0.3, 0.3)
    matrix = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    found = connect(lambda: x @ matrix @ x, [x], [torch.tensor([1.0, -1.0])], [torch.tensor([-2.0, 3.0])], points=11)
    assert found.barrier == 0.0
    assert found.fractions == pytest.approx([i / 10 for i in range(11)])
    assert found.losses[0] == pytest.approx(2.0)
    assert found.losses[-1] == pytest.approx(11.0)


def test_the_barrier_of_a_double_well():
    x = parameter(7.0)

    def loss() -> Tensor:  # wells at -1 and 1 with the levels -0.5 and 0.5, a hill of height 1 between
        return ((x.square() - 1).square() + 0.5 * x).sum()

    found = connect(loss, [x], [torch.tensor([-1.0])], [torch.tensor([1.0])])
    assert found.barrier == pytest.approx(1.0, abs=1e-12)
    assert found.losses[0] == pytest.approx(-0.5)
    assert found.losses[10] == pytest.approx(1.0)
    assert x.tolist() == [7.0]


def test_the_ends_of_a_connection_are_the_given_weights():
    model, x = small_net()
    model.eval()
    params = list(model.parameters())
    start, end = ([torch.randn_like(param) for param in params] for _ in range(2))
    seen = []

    def loss() -> Tensor:
        seen.append([param.detach().clone() for param in params])
        return model(x).square().mean()

    connect(loss, params, start, end, points=3)
    assert all(torch.equal(a, b) for a, b in zip(seen[0], start, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(seen[2], end, strict=True))


def measurements(model: nn.Module, loss):
    params = list(model.parameters())
    across, up = (random_direction(params, seed=seed, with_vectors=True) for seed in (1, 2))
    return {
        "line": lambda: line(loss, params, across, [-1.0, 0.3, 1e30], model=model),
        "plane": lambda: plane(loss, params, (across, up), [-1.0, 0.3], [2.0, -7.0], model=model),
        "connect": lambda: connect(loss, params, across, up, points=4, model=model),
    }


@pytest.mark.parametrize("name", ["line", "plane", "connect"])
@pytest.mark.parametrize("fails_at", [0, 1, 2, None])
def test_every_exit_restores_the_model(name, fails_at):
    model, x = small_net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    calls = 0

    def loss() -> Tensor:
        nonlocal calls
        calls += 1
        value = model(x).square().mean()
        if fails_at is not None and calls > fails_at:
            raise KeyboardInterrupt
        return value

    measure = measurements(model, loss)[name]
    if fails_at is None:
        measure()
    else:
        with pytest.raises(KeyboardInterrupt):
            measure()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_weights_of_another_shape_are_refused():
    x = parameter(1.0, 2.0)
    with pytest.raises(ValueError, match=r"end has the shapes \[\(3,\)\].*parameters have \[\(2,\)\]; leave out"):
        connect(lambda: x.sum(), [x], [torch.ones(2)], [torch.ones(3)])
    with pytest.raises(ValueError, match="direction has the shapes"):
        line(lambda: x.sum(), [x], [], [0.0])
    with pytest.raises(ValueError, match="points must be a whole number and at least 3"):
        connect(lambda: x.sum(), [x], [x], [x], points=2)


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_a_path_with_nan_has_no_barrier_to_report(place):
    x = parameter(0.0)
    found = connect(
        lambda: (x * (math.nan if x.item() == place else 1.0)).sum(), [x], [torch.zeros(1)], [torch.ones(1)]
    )
    assert math.isnan(found.barrier)
